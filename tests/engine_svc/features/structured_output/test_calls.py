"""Calls of tools in every format with a grammar: an engine writes them, the format's parser reads them."""

from __future__ import annotations

import json

from engine_svc.core.request import FinishReason
from engine_svc.features.structured_output.constraint import ConstraintKind
from frontend_svc.parsers.declared_tools import call_tags
from frontend_svc.parsers.parser import CallRules
from frontend_svc.parsers.registry import TOOL_PARSERS
from tests.engine_svc.features.structured_output.engine_rig import Asked, Rig, spec, text_of
from tests.frontend_svc.parsers.transcripts import run
from triptych.api.v1 import chat_message_pb2

FORMS = sorted(TOOL_PARSERS)
SCHEMAS = {
    "count": {"properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]},
    "draw": {"properties": {"what": {"enum": ["crab", "fox"]}}, "required": ["what"]},
}
TOOLS = [
    chat_message_pb2.Tool(
        name=name,
        strict=name == "count",
        parameters_json_schema=json.dumps({"type": "object", "additionalProperties": False, **schema}),
    )
    for name, schema in SCHEMAS.items()
]
REQUIRED = chat_message_pb2.ToolChoice(mode=chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED)
NUM_ANSWERS = 4


def is_held(name: str, arguments: dict[str, object]) -> bool:
    if name == "count":
        return arguments.keys() == {"n"} and arguments["n"] in range(100)
    return arguments.keys() == {"what"} and arguments["what"] in ("crab", "fox")


def test_a_demanded_answer_is_calls_in_the_format_of_each_parser():
    rig = Rig(max_num_seqs=64, max_model_len=400)
    asked = {}
    try:
        for name in FORMS:
            for choice, is_one in ((REQUIRED, False), (REQUIRED, True), ({"name": "draw"}, True)):
                request = chat_message_pb2.ChatRequest(tools=TOOLS, tool_choice=choice)
                request.parallel_tool_calls = not is_one
                tags = spec(ConstraintKind.STRUCTURAL_TAG, call_tags(request, TOOL_PARSERS[name]))
                asked[name, str(choice), is_one] = [Asked(tags, options={"max_tokens": 300})] * NUM_ANSWERS
        flat = [one for each in asked.values() for one in each]
        answers = iter(rig.answer(flat))
    finally:
        rig.close()
    num_finished, num_parallel = 0, 0
    for name, choice, is_one in asked:
        for _ in range(NUM_ANSWERS):
            answered = next(answers)
            rules = CallRules(frozenset(SCHEMAS), opening=TOOL_PARSERS[name].form.trigger)
            message = run(TOOL_PARSERS[name].open(rules), [text_of(answered.token_ids)])
            is_whole = answered.end.reason is FinishReason.STOP
            # The last one of an answer that was cut may be cut as well.
            num_whole = len(message.calls) - (not is_whole)
            calls = [(called, json.loads(text)) for _, _, called, text in message.calls[:num_whole]]
            if is_whole:
                num_finished += 1
                assert calls and not message.content.strip() and not message.incomplete
                assert not is_one or len(calls) == 1
            num_parallel += len(calls) > 1
            assert all(is_held(*call) for call in calls), (name, calls)
            assert "draw" not in choice or {called for called, _ in calls} <= {"draw"}
    assert num_finished >= 0.6 * len(flat)
    assert num_parallel >= len(FORMS) / 2


def test_an_answer_with_a_schema_is_calls_or_a_text_of_it_in_the_format_of_each_parser():
    schema = {"type": "object", "properties": {"sum": {"enum": [1, 2]}}, "required": ["sum"]}
    rig = Rig(max_num_seqs=64, max_model_len=400)
    request = chat_message_pb2.ChatRequest(tools=TOOLS)
    request.sampling.structured_output.json_schema = json.dumps({**schema, "additionalProperties": False})
    asked = [
        Asked(
            spec(ConstraintKind.STRUCTURAL_TAG, call_tags(request, TOOL_PARSERS[name])),
            options={"max_tokens": 300, "temperature": temperature},
        )
        for name in FORMS
        for temperature in (0, 1, 1, 2, 2, 2)
    ]
    try:
        answers = rig.answer(asked)
    finally:
        rig.close()
    num_texts, num_calls = 0, 0
    for index, answered in enumerate(answers):
        if answered.end.reason is not FinishReason.STOP:
            continue
        format_ = TOOL_PARSERS[FORMS[index * len(FORMS) // len(answers)]]
        rules = CallRules(frozenset(SCHEMAS), opening=format_.form.trigger)
        message = run(format_.open(rules), [text_of(answered.token_ids)])
        if message.reasoning and not message.content:
            # The model's end token is that of a message of gpt-oss.
            continue
        if message.calls:
            num_calls += 1
            assert not message.content.strip() and not message.incomplete
            assert all(is_held(called, json.loads(text)) for _, _, called, text in message.calls)
        else:
            num_texts += 1
            assert json.loads(message.content) in ({"sum": 1}, {"sum": 2})
    assert min(num_texts, num_calls) >= 3
