"""Errors over HTTP name fields as the client wrote them, in the message and as param."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from frontend_svc.protocols.anthropic.requests import MessagesBody
from frontend_svc.protocols.openai.bodies import Base, ChatBody, CompletionBody
from frontend_svc.protocols.openai.responses import ResponseBody
from tests.field_values import field_values
from tests.frontend_svc.fakes import TOKENIZER, FakeEngine, FakeRequest, answer
from tests.frontend_svc.protocols.test_openai import TEMPLATE, TEXT, served
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych.engine.v1 import step_pb2

MESSAGES = [{"role": "user", "content": "the cat"}]
Body = dict[str, Any]


def completion_fields(sampling: Body) -> Body:
    fields = dict(sampling)
    if "include_stop_in_output" in fields:
        fields["include_stop_str_in_output"] = fields.pop("include_stop_in_output")
    if "logit_bias" in fields:
        fields["logit_bias"] = {
            str(entry.get("token_id", index)): entry.get("bias", 0)
            for index, entry in enumerate(fields["logit_bias"])
        }
    return fields


def chat_fields(sampling: Body) -> Body:
    fields = completion_fields(sampling)
    if "max_tokens" in fields:
        fields["max_completion_tokens"] = fields.pop("max_tokens")
    if "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return fields


def response_fields(sampling: Body) -> Body:
    fields = completion_fields(sampling)
    if "max_tokens" in fields:
        fields["max_output_tokens"] = fields.pop("max_tokens")
    return fields


def message_fields(sampling: Body) -> Body:
    fields = dict(sampling)
    if "stop" in fields:
        fields["stop_sequences"] = fields.pop("stop")
    return fields


Protocol = tuple[str, type[Base], Body, Callable[[Body], Body]]
PROTOCOLS: dict[str, Protocol] = {
    "completions": ("/v1/completions", CompletionBody, {"prompt": "the cat"}, completion_fields),
    "chat": ("/v1/chat/completions", ChatBody, {"messages": MESSAGES}, chat_fields),
    "responses": ("/v1/responses", ResponseBody, {"input": "the cat"}, response_fields),
    "messages": ("/v1/messages", MessagesBody, {"messages": MESSAGES}, message_fields),
}


def broken_bodies(kind: type[Base], translated: Callable[[Body], Body]) -> Iterator[Body]:
    """Fields that break one rule of the sampling parameters, where the body can have them."""
    names = {field.name for field in msgspec.structs.fields(kind)}
    for value in field_values(sampling_pb2.SamplingParams.DESCRIPTOR, TOKENIZER.get_vocab_size()):
        fields = {} if value.keeps_rules else translated(value.fields)
        # JSON has no NaN and no infinity.
        if fields and fields.keys() <= names and not re.search("NaN|Infinity", json.dumps(fields)):
            yield fields


def named_in(reply: Body, fields: Body) -> bool:
    """Whether an error names a field that the client wrote: at the start of its message, and as param."""
    error = reply["error"]
    roots = {
        re.split(r"[.\[]", name)[0] for name in (error.get("param"), error["message"].split(" ")[0]) if name
    }
    return bool(roots) and roots <= {f"{name}{end}" for name in fields for end in ("", ":")}


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_each_broken_rule_names_a_field_of_the_body(protocol: str) -> None:
    path, kind, base, translated = PROTOCOLS[protocol]
    bodies = list(broken_bodies(kind, translated))
    assert len(bodies) >= 15
    async with served() as client:
        for fields in bodies:
            reply = await client.post(path, {**base, **fields})
            assert reply.status == 400, (fields, reply.content)
            assert named_in(reply.body, fields), (fields, reply.body)


TOOL = {"name": "add", "parameters": {"type": "object"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "no JSON"}}


# Path, body, and the field of it that the error names.
ELSEWHERE: list[tuple[str, Body, str]] = [
    ("/v1/completions", {"prompt": "a", "response_format": SCHEMA}, "response_format"),
    ("/v1/completions", {"prompt": "a", "guided_regex": "a"}, "guided_regex"),
    ("/v1/completions", {"prompt": [9999]}, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, "prompt[0]"),
    ("/v1/completions", {"prompt": ["a" * 9999]}, "prompt[0]"),
    ("/v1/completions", {"prompt": ["a", "a" * 9999]}, "prompt[1]"),
    ("/v1/completions", {"prompt": [[5], [9999]], "stream": True}, "prompt[1]"),
    ("/v1/completions", {"prompt": [[]], "stream": True}, "prompt[0]"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    (
        "/v1/completions",
        {"prompt": "a", "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
    ),
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": SCHEMA}, "response_format"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "content": [], "tool_calls": [CALL]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": ""}, {"role": "user"}]},
        "messages[1].content",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "tools": [{"type": "other"}, {"type": "function", "function": TOOL | {"name": "-"}}] * 2,
        },
        "tools[3].function.name",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": {"type": "function", "function": {"name": "other"}},
        },
        "tool_choice",
    ),
    (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
        "text.format",
    ),
    ("/v1/responses", {"input": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    (
        "/v1/responses",
        {"input": "a", "tools": [{"type": "web_search"}, {**TOOL, "type": "function", "name": "-" * 99}]},
        "tools[1].name",
    ),
    (
        "/v1/messages",
        {"messages": MESSAGES, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_config.format.schema",
    ),
    (
        "/v1/messages",
        {"messages": MESSAGES, "output_format": {"type": "json_schema", "schema": {}}},
        "output_format.schema",
    ),
    (
        "/v1/messages",
        {"messages": MESSAGES, "tools": [{"name": "-" * 99, "input_schema": {}}]},
        "tools[0].name",
    ),
]


async def test_an_error_names_the_field_where_the_request_has_another_one() -> None:
    # Its engine has no grammar backend.
    async with served(FakeEngine(answer(TEXT), chat_template=TEMPLATE)) as client:
        for path, body, field in ELSEWHERE:
            error = (await client.post(path, body)).body["error"]
            assert re.search(rf"(^|: ){re.escape(field)}(?!\w)", error["message"]), error
            assert "sampling" not in error["message"]
            assert error.get("param", field).startswith(field), error


def without_a_token(engine: FakeEngine, request: FakeRequest) -> None:
    """As an engine ends an output whose request's own rules leave it no token."""
    fields = ["sampling.min_tokens", "sampling.structured_output"]
    ended = step_pb2.StepFinished(
        reason=output_pb2.FINISH_REASON_ERROR,
        message="the request's own rules leave no token to choose: min_tokens, structured_output",
        error_fields=fields,
    )
    engine.step({request: TOKENIZER.encode("the").ids})
    engine.step({request: []}, finished={request: ended})


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_leaves_itself_no_token_is_at_fault_also_late(
    protocol: str, stream: bool
) -> None:
    """Clients send a request again by themselves after a status from 500 on."""
    path, _, base, _ = PROTOCOLS[protocol]
    engine = FakeEngine(without_a_token, chat_template=TEMPLATE, structured_output_backends=["llguidance"])
    choice: Body
    name, choice = "structured_outputs.choice", {"structured_outputs": {"choice": ["a"]}}
    if protocol == "messages":
        name, choice = "output_format.schema", {"output_format": {"type": "json_schema", "schema": {}}}
    async with served(engine) as client:
        reply = await client.post(path, {**base, "min_tokens": 5, **choice, "stream": stream})
    text = f"the request's own rules leave no token to choose: min_tokens; {name}"
    if stream:
        assert reply.status == 200
        last = [line for line in reply.content.decode().splitlines() if text in line]
        assert len(last) == 1
        assert not re.search("server_error|api_error", last[0])
        return
    error = reply.body["error"]
    assert (reply.status, error["message"]) == (400, text)
    if protocol != "messages":
        assert (error["param"], error["code"]) == ("min_tokens", "no_token_left")
