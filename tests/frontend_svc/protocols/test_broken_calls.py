"""A tool call that breaks: no client of any API runs it, whether it was sent in part or is text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frontend_svc.fakes import AT_LENGTH, TOKENIZER, FakeEngine, FakeRequest
from tests.frontend_svc.parsers.transcripts import is_json
from tests.frontend_svc.protocols.test_messages import events_of as message_events
from tests.frontend_svc.protocols.test_openai import Reply, served
from tests.frontend_svc.protocols.test_responses import TEMPLATE, engine_of, events_of

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": PARAMETERS}
ASKED = [{"role": "user", "content": "the cat"}]
CHAT: dict[str, Any] = {"messages": ASKED, "tools": [{"type": "function", "function": FUNCTION}]}
RESPONSE: dict[str, Any] = {"input": "the cat", "tools": [{"type": "function", **FUNCTION}]}
TOOL: dict[str, Any] = {"name": "f", "input_schema": PARAMETERS}
MESSAGE: dict[str, Any] = {"max_tokens": 99, "messages": ASKED, "tools": [TOOL]}
HEAD = '<tool_call>\n{"name": "f", "arguments": '
WHOLE = f'{HEAD}{{"a": "x"}}}}\n</tool_call>\n'
BROKEN = {
    "a raw line break inside a string": f'{HEAD}{{"a": "b\nc"}}}}\n</tool_call>',
    "the output ends inside the arguments": f'{HEAD}{{"a": "b',
    "the output ends behind the arguments": f'{HEAD}{{"a": "b"}}',
    "no bracket behind the arguments": f'{HEAD}{{"a": "b"}}\n</tool_call>',
    "a second call breaks": f'{WHOLE}{HEAD}{{"a": }}}}\n</tool_call>',
}


def streamed_chat(reply: Reply) -> tuple[list[dict[str, Any]], str, str]:
    """The calls as a client joins them, the content, and the finish reason."""
    calls: list[dict[str, Any]] = []
    content = ""
    choices = [event["choices"][0] for event in reply.events[:-1]]
    for choice in choices:
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"arguments": "", "incomplete": False})
            calls[-1]["arguments"] += call["function"]["arguments"]
            calls[-1]["incomplete"] |= call.get("incomplete", False)
    return calls, content, choices[-1]["finish_reason"]


@pytest.mark.parametrize("output", BROKEN.values(), ids=list(BROKEN))
async def test_what_was_sent_of_a_call_that_breaks_is_marked_and_is_no_json(output: str) -> None:
    is_second = output.startswith(WHOLE)
    async with served(engine_of(output)) as client:
        whole = (await client.post("/v1/chat/completions", CHAT)).body["choices"][0]
        stream = await client.post("/v1/chat/completions", {**CHAT, "stream": True})
        response = events_of(await client.post("/v1/responses", {**RESPONSE, "stream": True}))
        eager = {**MESSAGE, "stream": True, "tools": [{**TOOL, "eager_input_streaming": True}]}
        message = message_events(await client.post("/v1/messages", eager))
    assert whole["message"]["content"].strip() == output.removeprefix(WHOLE).strip()
    assert whole["finish_reason"] == ("tool_calls" if is_second else "stop")

    calls, content, reason = streamed_chat(stream)
    assert [call["incomplete"] for call in calls] == [False] * is_second + [True]
    assert (is_json(calls[-1]["arguments"]), reason) == (False, "stop")
    assert output.endswith(calls[-1]["arguments"] + content)

    final = response[-1]["response"]
    assert (response[-1]["type"], final["status"]) == ("response.incomplete", "incomplete")
    assert final["incomplete_details"] == {"reason": "incomplete_call"}
    items = [item for item in final["output"] if item["type"] == "function_call"]
    assert [item["status"] for item in items] == ["completed"] * is_second + ["incomplete"]
    assert items[-1]["arguments"] == calls[-1]["arguments"]
    done = [each["name"] for each in response if each["type"] == "response.function_call_arguments.done"]
    assert done == ["f"] * is_second, "clients run a call whose arguments are done"

    stops = [event for event in message if event["type"] == "content_block_stop"]
    assert sum(stop.get("incomplete", False) for stop in stops) == 1
    assert message[-2]["delta"]["stop_reason"] == "end_turn"


@pytest.mark.parametrize("output", BROKEN.values(), ids=list(BROKEN))
async def test_a_call_that_breaks_is_text_over_anthropic_whole_or_streamed(output: str) -> None:
    async with served(engine_of(output)) as client:
        whole = (await client.post("/v1/messages", MESSAGE)).body
        events = message_events(await client.post("/v1/messages", {**MESSAGE, "stream": True}))
    uses = ["tool_use"] * output.startswith(WHOLE)
    assert sorted(block["type"] for block in whole["content"]) == sorted([*uses, "text"])
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert begun == [*uses, "text"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == ("tool_use" if uses else "end_turn")


async def test_a_call_in_which_an_output_is_cut_off_is_marked_whole_or_streamed() -> None:
    def cut(engine: FakeEngine, request: FakeRequest) -> None:
        engine.step({request: TOKENIZER.encode(f'{HEAD}{{"a": "b"}}').ids}, finished={request: AT_LENGTH})

    async with served(FakeEngine(cut, chat_template=TEMPLATE)) as client:
        whole = (await client.post("/v1/chat/completions", CHAT)).body["choices"][0]
        stream = await client.post("/v1/chat/completions", {**CHAT, "stream": True})
        message = (await client.post("/v1/messages", MESSAGE)).body
        events = message_events(await client.post("/v1/messages", {**MESSAGE, "stream": True}))
    (call,) = whole["message"]["tool_calls"]
    arguments = call["function"]["arguments"]
    assert (call["incomplete"], is_json(arguments), whole["finish_reason"]) == (True, False, "length")
    assert streamed_chat(stream) == ([{"arguments": arguments, "incomplete": True}], "", "length")
    assert message["content"][0]["input"].keys() == {"INVALID_JSON"}
    (delta,) = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads(delta["partial_json"]) == message["content"][0]["input"]


async def test_a_call_that_was_incomplete_cannot_be_sent_back_as_one_that_was_made() -> None:
    function = {"name": "f", "arguments": '{"a": "b'}
    called = {"role": "assistant", "tool_calls": [{"id": "1", "incomplete": True, "function": function}]}
    async with served(engine_of("a mat")) as client:
        reply = await client.post("/v1/chat/completions", {**CHAT, "messages": [*ASKED, called]})
    assert (reply.status, reply.body["error"]["param"]) == (400, "messages[1].tool_calls[0].incomplete")
