"""Constraints of outputs: what is refused by name, what an engine gets, and what is kept of a check."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from engine_svc.convert.feature import AddContext
from engine_svc.features.structured_output.wire import StructuredOutputOfAdd
from frontend_svc.generation.caller import LOCAL_CALLER
from frontend_svc.generation.preprocess import check_request, needs_of, prepare
from frontend_svc.options import OPTIONS
from frontend_svc.parsers.registry import ParserNames
from frontend_svc.text.model import ServedModel
from frontend_svc.text.prompt import RequestPrompt
from tests.engine_svc.session.service_rig import make_facts
from tests.frontend_svc.fakes import FakeEngine, answer, make_request, read_all, serving
from tests.frontend_svc.options.asking import BYTE_LEVEL, LIMITS, model_of
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych.engine.v1 import session_pb2
from triptych_kit.errors import InvalidArgument, Unimplemented

FIELD = "sampling.structured_output"
READY = session_pb2.Ready(structured_output_backends=["llguidance", "xgrammar"])
EMAIL = json.dumps({"type": "object", "properties": {"email": {"type": "string"}}, "required": ["email"]})
UNKNOWN = json.dumps({"properties": {"a": {"type": "object", "minProperties": 3}}})


OPENING, CLOSING = (BYTE_LEVEL.encode(text).ids for text in ("<think>", "</think>"))


def served(ready: session_pb2.Ready = READY, **fields: object) -> ServedModel:
    return model_of(ready=ready, **fields)


def asking(**fields: object) -> generate_pb2.GenerateRequest:
    return make_request([5], structured_output=fields)


def violations_of(request: generate_pb2.GenerateRequest) -> dict[str, str]:
    try:
        asyncio.run(check_request(request, RequestPrompt(request), served(), LIMITS))
    except InvalidArgument as error:
        return dict(error.violations)
    return {}


async def sent(request: generate_pb2.GenerateRequest, model: ServedModel | None = None):
    model = model or served()
    await check_request(request, RequestPrompt(request), model, LIMITS)
    return (await prepare(request, RequestPrompt(request), model, LOCAL_CALLER)).entries[0]


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({}, FIELD, "is not set, must have exactly one of json_schema, json_object, regex"),
        ({"json_schema": ""}, f"{FIELD}.json_schema", "must not be empty"),
        ({"json_object": False}, f"{FIELD}.json_object", "must be true"),
        ({"regex": ""}, f"{FIELD}.regex", "must not be empty"),
        ({"regex": "a\0b"}, f"{FIELD}.regex", "NUL"),
        ({"choice": {}}, f"{FIELD}.choice.choices", "has 0 texts, must have 1..4096"),
        ({"choice": {"choices": ["a", ""]}}, f"{FIELD}.choice.choices", r"choices\[1\] has 0 characters"),
        ({"choice": {"choices": ["a\0"]}}, f"{FIELD}.choice.choices", "NUL"),
        ({"grammar": ""}, f"{FIELD}.grammar", "must not be empty"),
        ({"structural_tag": ""}, f"{FIELD}.structural_tag", "must not be empty"),
        ({"regex": "a", "whitespace_pattern": " "}, f"{FIELD}.whitespace_pattern", "unset for regex"),
        (
            {"choice": {"choices": ["a"]}, "disable_any_whitespace": True},
            f"{FIELD}.disable_any_whitespace",
            "unset for choice",
        ),
        (
            {"json_object": True, "disable_additional_properties": True},
            f"{FIELD}.disable_additional_properties",
            "unset for json_object",
        ),
        (
            {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
            f"{FIELD}.whitespace_pattern",
            "disable_any_whitespace",
        ),
        ({"regex": "a", "backend": "x"}, f"{FIELD}.backend", "must be one of llguidance, xgrammar, auto"),
        ({"regex": "a", "start": 9}, f"{FIELD}.start", "must be one of"),
    ],
)  # fmt: skip
def test_123_a_constraint_that_is_none_is_refused_by_field(fields, field, words):
    found = violations_of(asking(**fields))
    assert set(found) == {field}
    assert re.search(words, found[field])


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "[a-z]+"},
        {"choice": {"choices": ["yes", "no"]}},
        {"json_object": True, "backend": "xgrammar"},
        {"grammar": 'start: "a" /b+/'},
        {"json_schema": UNKNOWN, "disable_additional_properties": True, "lenient": True},
        {"structural_tag": "[]"},
    ],
)
async def test_a_constraint_reaches_the_engine_as_the_client_wrote_it(fields):
    entry = await sent(asking(**fields))
    assert entry.sampling.structured_output == sampling_pb2.StructuredOutput(**fields)


async def test_the_engine_chooses_where_the_client_names_no_backend():
    entry = await sent(asking(json_object=True, backend="auto"))
    assert not entry.sampling.structured_output.backend


async def test_an_engine_without_a_backend_is_not_asked():
    request = asking(regex="a")
    (need,) = needs_of(request)
    assert need.is_met(served())
    assert not need.is_met(served(session_pb2.Ready()))
    with pytest.raises(Unimplemented, match=r"not served: sampling\.structured_output") as caught:
        await sent(request, served(session_pb2.Ready()))
    assert caught.value.metadata == {"fields": FIELD}


async def test_a_request_goes_to_engines_that_have_its_backend():
    (need,) = needs_of(asking(json_object=True, backend="xgrammar"))
    assert not need.is_met(served(session_pb2.Ready(structured_output_backends=["llguidance"])))


async def test_a_constraint_may_begin_behind_the_reasoning():
    after = sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING
    request = asking(regex="a", start=after)
    entry = await sent(request, served(parsers=ParserNames("none", "think")))
    assert entry.sampling.structured_output.start == after
    assert list(entry.reasoning_options.end_token_ids)
    with pytest.raises(Unimplemented, match=r"structured_output\.start: no reasoning parser"):
        await sent(request)


async def test_an_output_that_ended_by_length_is_marked():
    request = asking(regex="a")
    prepared = await prepare(request, RequestPrompt(request), served(), LOCAL_CALLER)
    option = next(option for option in OPTIONS if FIELD in option.fields)
    reader = option.reader(request, prepared.prompt, 0)
    for reason, match, expected in (
        (output_pb2.FINISH_REASON_LENGTH, {}, True),
        (output_pb2.FINISH_REASON_STOP, {"eos": 0}, False),
        (output_pb2.FINISH_REASON_STOP, {"token_id": 7}, False),
        (output_pb2.FINISH_REASON_STOP, {"string": "x"}, True),
    ):
        finished = generate_pb2.Finished(reason=reason, stop_match=output_pb2.StopMatch(**match))
        reader.fill(finished, [])
        assert finished.is_incomplete is expected
    free = make_request([5])
    assert option.reader(free, prepared.prompt, 0) is None


@pytest.mark.parametrize(
    ("prompt", "output", "is_incomplete"),
    [
        ([5], [6, 9], True),  # the model answered, or ended, within its reasoning
        ([5], [6, *CLOSING, 7, 9], False),
        ([5, *CLOSING], [7, 9], False),
        ([5, *CLOSING, *OPENING], [7, 9], True),
    ],
)
async def test_an_output_that_ends_before_its_constraint_begins_is_marked(prompt, output, is_incomplete):
    after = sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING
    request = make_request(prompt, structured_output={"regex": "a", "start": after})
    model = served(parsers=ParserNames("none", "think"))
    prepared = await prepare(request, RequestPrompt(request), model, LOCAL_CALLER)
    option = next(option for option in OPTIONS if FIELD in option.fields)
    finished = generate_pb2.Finished(
        reason=output_pb2.FINISH_REASON_STOP, stop_match=output_pb2.StopMatch(eos=9)
    )
    option.reader(request, prepared.prompt, 0).fill(finished, output)
    assert finished.is_incomplete is is_incomplete


SENT = (
    {"json_schema": EMAIL, "disable_additional_properties": True, "lenient": True},
    {"json_object": True, "disable_any_whitespace": True},
    {"json_object": True, "any_whitespace": True},
    {"json_object": True, "whitespace_pattern": "[ ]?", "lenient": True},
    {"regex": "[a-z]+", "lenient": True, "backend": "auto"},
    {"choice": {"choices": ["yes", "no"]}, "backend": "llguidance"},
    {"grammar": 'start: "a" /b+/', "start": sampling_pb2.STRUCTURED_OUTPUT_START_AT_ONCE},
    {
        "structural_tag": json.dumps(
            {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}
        ),
        "disable_additional_properties": True,
        "start": sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING,
    },
)


@pytest.mark.parametrize("fields", SENT, ids=lambda fields: next(iter(fields)))
async def test_an_engine_takes_what_a_frontend_sends(fields):
    entry = await sent(asking(**fields), served(parsers=ParserNames("none", "think")))
    facts = make_facts()
    parsed = StructuredOutputOfAdd(("llguidance",)).parse(entry, AddContext(facts, None, [5]))
    assert parsed is not None


async def test_constraints_go_to_engines_with_a_backend_alone():
    able = FakeEngine(answer("a"), structured_output_backends=["llguidance"])
    other = FakeEngine(answer("free"), dp_rank=1)
    async with serving(able, other) as (client, _):
        await client.until_engines_are_ready(2)
        for _ in range(4):
            _, text, _, finished = await read_all(client.generate(structured_output={"regex": "a"}))
            assert (text, finished.is_incomplete) == ("a", False)
    assert len(able.requests) == 4
