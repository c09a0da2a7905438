"""Constraints through a frontend's objects and an engine: answers are in the language that was asked for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator

import pytest

from tests.triptych_cli.offline.test_llm import OPTIONS
from triptych_cli.llm import LLM, SamplingParams
from triptych_cli.offline.params import StructuredOutput
from triptych_cli.services import embedded_model
from triptych_kit.errors import InvalidArgument

# The format of Hermes, which the embedded model was never shown.
TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call> {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}<|user|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["crab", "fox"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": name, "description": "counts", "parameters": SCHEMA, "strict": strict}
    for name, strict in (("count", True), ("draw", False))
]
QUESTION = [{"role": "user", "content": "How many legs has a crab?"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model") / "weights"
    shutil.copytree(embedded_model(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(folder, engine="in-process", **OPTIONS) as llm:
        yield llm


def drawn(constraint: StructuredOutput, **options: object) -> SamplingParams:
    return SamplingParams(
        **{
            "temperature": 1.0,
            "seed": 3,
            "n": 4,
            "max_tokens": 60,
            "structured_output": constraint,
            **options,
        }
    )


def is_count(arguments: object) -> bool:
    return (
        isinstance(arguments, dict)
        and set(arguments) == {"animal", "legs"}
        and arguments["animal"] in ("crab", "fox")
        and arguments["legs"] in range(10)
    )


def test_answers_follow_their_constraints(llm: LLM) -> None:
    schema = StructuredOutput(json_schema=json.dumps(SCHEMA), disable_any_whitespace=True)
    (answers,) = llm.generate("A crab: ", drawn(schema), progress=False)
    assert [(one.finish_reason, one.is_incomplete) for one in answers.outputs] == [("stop", False)] * 4
    assert all(is_count(json.loads(one.text)) for one in answers.outputs)
    (answers,) = llm.generate("A crab: ", drawn(StructuredOutput(regex="[a-f]{3}[0-9]{2}")), progress=False)
    assert all(re.fullmatch("[a-f]{3}[0-9]{2}", one.text) for one in answers.outputs)
    assert len({one.text for one in answers.outputs}) > 1


def test_an_answer_that_is_cut_says_so(llm: LLM) -> None:
    long = drawn(StructuredOutput(regex="[a-f]{3000}"), max_tokens=5)
    (answers,) = llm.generate("A crab: ", long, progress=False)
    assert {(one.finish_reason, one.is_incomplete) for one in answers.outputs} == {("length", True)}
    free = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    assert not llm.generate("A crab: ", free, progress=False)[0].outputs[0].is_incomplete


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"count", "draw"}),
        ({"type": "function", "function": {"name": "draw"}}, {"draw"}),
    ],
)
def test_a_demanded_answer_is_calls_with_arguments_in_their_schema(llm: LLM, choice, names) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=300)
    (answers,) = llm.chat(
        QUESTION, params, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, progress=False
    )
    for one in answers.outputs:
        (call,) = one.tool_calls
        assert call.name in names
        assert is_count(json.loads(call.arguments))
        assert (one.text.strip(), one.finish_reason, one.is_incomplete) == ("", "stop", False)


def test_a_continued_message_is_constrained_from_where_it_ends(llm: LLM) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": '{"legs": '}]
    params = drawn(StructuredOutput(regex="[0-9]{2}\\}"), stop=["9}"])
    (answers,) = llm.chat(
        begun, params, add_generation_prompt=False, continue_final_message=True, progress=False
    )
    for one in answers.outputs:
        assert re.fullmatch("[0-9]" if one.is_incomplete else "[0-9]{2}}", one.text)


def test_a_schema_that_cannot_be_enforced_is_refused_by_keyword(
    llm: LLM,
) -> None:
    overlapping = {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "multipleOf": 3}]}
    schema = StructuredOutput(json_schema=json.dumps({"properties": {"legs": overlapping}}))
    with pytest.raises(InvalidArgument, match="oneOf at #/properties/legs"):
        llm.generate("A crab: ", drawn(schema), progress=False)


def test_a_constraint_that_is_none_is_refused_when_parameters_are_made() -> None:
    with pytest.raises(InvalidArgument, match="regex is '', must not be empty"):
        SamplingParams(structured_output=StructuredOutput(regex=""))
