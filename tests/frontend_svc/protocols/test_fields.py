"""Fields of a body that are not served: taken, refused, or refused with a suggestion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from frontend_svc.protocols.openai.bodies import (
    Base,
    ChatBody,
    CompletionBody,
    encode,
    read_body,
    read_object,
)
from frontend_svc.protocols.openai.fields import Refusal
from frontend_svc.protocols.openai.requests import (
    chat_names,
    chat_request,
    completion_names,
    generate_requests,
)
from frontend_svc.protocols.openai.responses import ResponseBody
from triptych_kit.errors import InvalidArgument, Unimplemented

BODIES: dict[type[Base], dict[str, Any]] = {
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
    CompletionBody: {"prompt": "x"},
    ResponseBody: {"input": "x"},
}
REFUSED = [(kind, name, refusal) for kind in BODIES for name, refusal in kind.refused.items()]


@pytest.mark.parametrize("kind", BODIES)
def test_fields_without_an_effect_are_named(kind: type[Base]) -> None:
    _, ignored = read_object({**BODIES[kind], **dict.fromkeys(kind.ignored, "a")}, kind)
    assert {"client_metadata", "service_tier", "user"} <= set(ignored) == kind.ignored


@pytest.mark.parametrize(("kind", "name", "refusal"), REFUSED)
def test_a_field_is_refused_unless_its_value_asks_for_nothing(
    kind: type[Base], name: str, refusal: Refusal
) -> None:
    for value in (*refusal.idle, refusal.default, [], ""):
        assert read_object({**BODIES[kind], name: value}, kind)[1] == []
    wrong: list[Any] = [{}, ["audio"], "x", 2]
    for value in wrong:
        if value in refusal.idle:
            continue
        with pytest.raises(Unimplemented, match=f"{name} is not served: "):
            read_object({**BODIES[kind], name: value}, kind)


@pytest.mark.parametrize("takes_unknown", [False, True])
@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("topP", "top_p"), ("maxTokens", "max_tokens")]
)
def test_a_served_field_with_a_mistake_is_refused(name: str, near: str, *, takes_unknown: bool) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name} is not served; did you mean {near}\\?$"):
        read_object({**BODIES[ChatBody], name: 1}, ChatBody, takes_unknown=takes_unknown)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            {"messages": [{"role": "boss", "content": "x"}]},
            "messages[0].role is 'boss', must be one of assistant, developer, system, tool, user",
        ),
        (
            {**BODIES[ChatBody], "response_format": {"type": "structural_tag"}},
            "response_format.type is 'structural_tag', must be one of json_object, json_schema, text",
        ),
        (
            {**BODIES[ChatBody], "tool_choice": "any"},
            "tool_choice is 'any', must be one of auto, none, required",
        ),
    ],
    ids=["role", "format", "choice"],
)
def test_a_value_that_is_none_of_a_list_is_refused_with_the_list(body: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_object(body, ChatBody)
    assert caught.value.message == says


def test_unknown_fields_are_taken_where_that_is_chosen() -> None:
    message = {"role": "user", "content": "x", "mood": "good", "title": None}
    body = {"messages": [message], "session": "s", "stream_options": {"include_usage": True, "x": 1}}
    with pytest.raises(InvalidArgument, match="is not served"):
        read_object(body, ChatBody)
    read, ignored = read_object(body, ChatBody, takes_unknown=True)
    assert sorted(ignored) == ["messages[0].mood", "session", "stream_options.x"]
    assert read.messages[0].content == "x"
    assert read.stream_options is not None
    assert read.stream_options.include_usage


def test_unknown_fields_are_taken_up_to_a_number() -> None:
    body = {**BODIES[ChatBody], **{f"field{index}": 1 for index in range(1000)}}
    with pytest.raises(InvalidArgument, match="field64 is not served"):
        read_object(body, ChatBody, takes_unknown=True)


def test_vllms_fields_pass_with_the_values_that_they_have_there_unset() -> None:
    unset = {
        "include_reasoning": True, "vllm_xargs": {}, "kv_transfer_params": {}, "documents": [],
        "detokenize": True, "return_tokens_as_token_ids": False, "logits_processors": [],
        "add_special_tokens": False, "mm_processor_kwargs": {}, "length_penalty": 1.0, "top_logprobs": 0,
    }  # fmt: skip
    body, ignored = read_object({**BODIES[ChatBody], **unset}, ChatBody)
    chat_request(body, ignored, chat_names())
    assert ignored == []


def test_of_two_limits_the_newer_one_counts() -> None:
    for older, named in ((3, ["max_tokens"]), (5, [])):
        limits = {"max_tokens": older, "max_completion_tokens": 5}
        body, ignored = read_object({**BODIES[ChatBody], **limits}, ChatBody)
        assert chat_request(body, ignored, chat_names()).sampling.max_tokens == 5
        assert ignored == named


TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
# Values of fields whose type does not tell one, and what else they need.
VALUES: dict[str, Any] = {
    "chat_template_kwargs": {"a": 1},
    "guided_json": {"type": "object"},
    "logit_bias": {"5": 1.0},
    "messages": [{"role": "user", "content": "y"}],
    "prompt": "y",
    "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "tool_choice": "required",
    **TOOLS,
}
NEEDED: dict[str, dict[str, Any]] = {
    "guided_whitespace_pattern": {"guided_regex": "a"},
    "tool_choice": TOOLS,
    "top_logprobs": {"logprobs": True},
}
# Of the answer's form, and the one that must be n.
OF_ANSWER = {"stream", "stream_options", "include_reasoning", "best_of"}


def request_of(kind: type[Base], fields: dict[str, Any]) -> bytes:
    body, ignored = read_object({**BODIES[kind], **fields}, kind)
    if isinstance(body, ChatBody):
        return chat_request(body, ignored, chat_names()).SerializeToString(deterministic=True)
    assert isinstance(body, CompletionBody)
    (request,) = generate_requests(body, completion_names())
    return request.SerializeToString(deterministic=True)


def values_of(field: Any) -> Iterator[Any]:
    if field.name in VALUES:
        yield VALUES[field.name]
        return
    kinds: list[Any] = list(getattr(field.type, "types", [field.type]))
    by_kind: dict[str, list[Any]] = {"int": [3], "float": [0.5], "str": ["x"], "bool": [True, False]}
    for each in kinds:
        name = type(each).__name__.removesuffix("Type").lower()
        if name == "list":
            item = type(each.item_type).__name__.removesuffix("Type").lower()
            yield by_kind[item]
        else:
            yield from by_kind.get(name, [])


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_each_served_field_changes_the_request(kind: type[Base]) -> None:
    body = msgspec.inspect.type_info(kind)
    assert isinstance(body, msgspec.inspect.StructType)
    for field in body.fields:
        needed = NEEDED.get(field.name, {})
        values = [] if field.name in OF_ANSWER else list(values_of(field))
        requests = {request_of(kind, {**needed, field.name: value}) for value in values}
        assert field.name in OF_ANSWER or requests - {request_of(kind, needed)}, field.name


def test_the_numbers_of_schemas_keep_all_their_digits() -> None:
    digits, large = "0.12345678901234567890123", "12345678901234567890123"
    schema = f'{{"maximum":{digits},"enum":[{large},1e400,0.1]}}'
    content = f"""{{"messages": [{{"role": "user", "content": "x"}}], "temperature": {digits},
        "response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}},
        "tools": [{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]}}"""
    body, ignored = read_body(content.encode(), ChatBody)
    request = chat_request(body, ignored, chat_names())
    assert request.sampling.temperature == pytest.approx(float(digits))
    assert request.sampling.structured_output.json_schema == schema
    assert request.tools[0].parameters_json_schema == schema
    assert encode(body.tools).count(digits.encode()) == 1
    with pytest.raises(InvalidArgument, match="temperature is a number out of range"):
        read_body(b'{"messages": [], "temperature": 1e400}', ChatBody)


def test_long_numbers_in_a_deep_body_are_refused_by_its_depth():
    content = b'{"model": "m", "messages": ' + b"[" * 900 + b"0.12345678901234567890123" + b"]" * 900 + b"}"
    with pytest.raises(InvalidArgument, match="nested too deeply"):
        read_body(content, ChatBody)
