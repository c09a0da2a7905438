"""Anthropic's Messages API: what chats answer, as messages and as events, and its errors."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from typing import Any

import pytest

from tests.frontend_svc.fakes import AT_LENGTH, TOKENIZER, WAIT_S, FakeEngine, FakeRequest, answer
from tests.frontend_svc.protocols.test_openai import TEXT, Reply, failing, served
from tests.frontend_svc.protocols.test_responses import CALL, TEMPLATE, engine_of, prompt_of

URL = "/v1/messages"
LONG = "the cat sat on the mat and the dog sat on the rug"  # longer than what the engine has cached
ASKED: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": LONG}]}
ADD = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def events_of(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream, each under its own type."""
    found = []
    for block in reply.content.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events, whose order is checked."""
    first, *middle, last, end = events
    message = first["message"]
    assert (first["type"], last["type"], end) == ("message_start", "message_delta", {"type": "message_stop"})
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open = False
    for event in middle:
        if event["type"] == "ping":
            continue
        kind = event["type"].removeprefix("content_block_")
        assert is_open == (kind != "start")
        if kind == "start":
            assert event["index"] == len(message["content"])
            block = event["content_block"]
            message["content"].append(block | ({"input": ""} if block["type"] == "tool_use" else {}))
        elif kind == "delta":
            (name,) = event["delta"].keys() - {"type"}
            message["content"][-1]["input" if name == "partial_json" else name] += event["delta"][name]
        elif message["content"][-1]["type"] == "tool_use":
            message["content"][-1]["input"] = json.loads(message["content"][-1]["input"] or "{}")
        is_open = kind != "stop"
    assert not is_open
    return {**message, **last["delta"], "usage": last["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


async def both(text: str, **more: Any) -> tuple[dict[str, Any], FakeRequest]:
    """The message of an engine that outputs `text`, which is that of its events too, and the request."""
    engine = engine_of(text)
    async with served(engine) as client:
        whole = await client.post(URL, {**ASKED, **more})
        assert whole.status == 200, whole.content
        streamed = await client.post(URL, {**ASKED, **more, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    message = assembled(events_of(streamed))
    assert without_ids(message) == without_ids(whole.body)
    assert message["id"] != whole.body["id"]
    return whole.body, engine.requests[0]


async def test_a_message_has_the_text_and_the_tokens_of_the_chat():
    message, request = await both(TEXT, system="be brief", temperature=0.5, top_k=3)
    prompt = f"[system] |be brief\n[user] |{LONG}\n[assistant] "
    assert prompt_of(request) == prompt
    sampling = request.entry.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (50, 0.5, 3)
    assert message["id"].startswith("msg_")
    assert without_ids(message) == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": TEXT, "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(TOKENIZER.encode(prompt).ids) - 16,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 16,
            "output_tokens": len(TOKENIZER.encode(TEXT).ids) + 1,
        },
    }


async def test_the_first_events_are_those_of_anthropic():
    async with served(engine_of(TEXT)) as client:
        events = events_of(await client.post(URL, {**ASKED, "stream": True}))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
    assert kinds.count("ping") == 1
    assert events[0]["message"]["usage"]["output_tokens"] == 0


async def test_reasoning_text_and_calls_are_blocks():
    message, _ = await both(
        f"let us add</think>calling{CALL}{CALL}",
        tools=[ADD],
        thinking={"type": "enabled", "budget_tokens": 99},
    )
    called = {"type": "tool_use", "name": "add", "input": {"a": 1}}
    assert without_ids(message)["content"] == [
        {"type": "thinking", "thinking": "let us add", "signature": ""},
        {"type": "text", "text": "calling", "citations": None},
        called,
        called,
    ]
    assert message["stop_reason"] == "tool_use"
    ids = [block["id"] for block in message["content"][2:]]
    assert len(set(ids)) == 2


async def test_a_stop_sequence_is_named():
    message, _ = await both(TEXT, stop_sequences=["on the"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "on the")
    assert message["content"][0]["text"] == "the cat sat "


async def test_a_limit_ends_a_message():
    def cut(engine: FakeEngine, request: FakeRequest) -> None:
        engine.step({request: TOKENIZER.encode("the cat").ids}, finished={request: AT_LENGTH})

    async with served(FakeEngine(cut, chat_template=TEMPLATE)) as client:
        reply = await client.post(URL, ASKED)
    assert reply.body["stop_reason"] == "max_tokens"


async def test_a_chat_with_tools_and_a_format_is_held_to_calls_or_a_text_of_the_schema():
    engine = engine_of(CALL, structured_output_backends=["llguidance"])
    schema = {"type": "object", "required": ["sum"]}
    function = {"name": "add", "parameters": ADD["input_schema"]}
    body = {
        "messages": ASKED["messages"],
        "tools": [{"type": "function", "function": function}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    async with served(engine) as client:
        reply = await client.post("/v1/chat/completions", body)
    (call,) = reply.body["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("add", '{"a": 1}')
    form = json.loads(engine.requests[0].entry.sampling.structured_output.structural_tag)["format"]
    calls, text = form["elements"]
    assert [tag["begin"] for tag in calls["tags"]] == ['<tool_call>\n{"name": "add", "arguments": ']
    assert text["json_schema"] == schema


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_within_a_call_leaves_a_call_in_part_over_every_api(stream):
    begun = CALL[: CALL.index("1}}")]

    def cut(engine: FakeEngine, request: FakeRequest) -> None:
        engine.step({request: TOKENIZER.encode(f"Well. {begun}").ids}, finished={request: AT_LENGTH})

    function = {"name": "add", "parameters": ADD["input_schema"]}
    chat = {"messages": ASKED["messages"], "tools": [{"type": "function", "function": function}]}
    responses = {"input": LONG, "tools": [{"type": "function", **function}]}
    async with served(FakeEngine(cut, chat_template=TEMPLATE)) as client:
        of_chat = await client.post("/v1/chat/completions", {**chat, "stream": stream})
        of_responses = await client.post("/v1/responses", {**responses, "stream": stream})
        of_messages = await client.post(URL, {**ASKED, "tools": [ADD], "stream": stream})
    if stream:
        choices = [event["choices"][0] for event in of_chat.events[:-1]]
        deltas = [choice["delta"] for choice in choices]
        assert all(deltas[:-1]), "events without content, of tokens that may begin a call"
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
        content = "".join(delta.get("content") or "" for delta in deltas)
        reason, arguments = choices[-1]["finish_reason"], "".join(call["arguments"] for call in calls)
        response = events_of(of_responses)[-1]["response"]
        parts = [event.get("delta", {}) for event in events_of(of_messages)]
        (of_call,) = [part["partial_json"] for part in parts if "partial_json" in part]
        partial = json.loads(of_call)["INVALID_JSON"]
    else:
        [choice] = of_chat.body["choices"]
        reason, content = choice["finish_reason"], choice["message"]["content"]
        [call] = choice["message"]["tool_calls"]
        arguments, response = call["function"]["arguments"], of_responses.body
        partial = of_messages.body["content"][1]["input"]["INVALID_JSON"]
        assert of_messages.body["stop_reason"] == "max_tokens"
    assert (reason, content.strip(), arguments, partial) == ("length", "Well.", '{"a": ', '{"a": ')
    message, call = response["output"]
    assert (response["status"], message["content"][0]["text"].strip()) == ("incomplete", "Well.")
    assert (call["status"], call["arguments"]) == ("incomplete", '{"a": ')


async def test_a_conversation_with_tools_becomes_messages_of_the_chat():
    use = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "two"}]}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    messages = [
        {"role": "user", "content": "one"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "and", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "ok", "citations": None}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    _, request = await both(TEXT, messages=messages, system=system, tools=[ADD])
    assert prompt_of(request) == (
        "<tool_call> add\n[system] |be brief\n[user] |one\nand\n[assistant] hm|ok|add(1)\n"
        "[tool] |two\n[user] |go on\n[assistant] "
    )


async def test_a_final_message_of_the_assistant_is_continued():
    messages = [*ASKED["messages"], {"role": "assistant", "content": "it is"}]
    _, request = await both(TEXT, messages=messages)
    assert prompt_of(request).endswith("[assistant] |it is")


@pytest.mark.parametrize(
    ("choice", "tags"),
    [({"type": "none"}, ""), ({"type": "any"}, "add"), ({"type": "tool", "name": "add"}, "add")],
)
async def test_a_tool_choice_is_that_of_the_chat(choice, tags):
    engine = engine_of(CALL, structured_output_backends=["llguidance"])
    async with served(engine) as client:
        reply = await client.post(URL, {**ASKED, "tools": [ADD], "tool_choice": choice})
        counted = await client.post(
            f"{URL}/count_tokens", {"messages": ASKED["messages"], "tools": [ADD], "tool_choice": choice}
        )
    assert reply.status == 200, reply.content
    (request,) = engine.requests
    assert ("<tool_call>" in prompt_of(request)) == (choice["type"] != "none")
    assert tags in str(request.entry.sampling.structured_output)
    assert counted.body == {"input_tokens": len(request.prompt)}


async def test_an_output_format_holds_the_text():
    engine = engine_of("{}", structured_output_backends=["llguidance"])
    chosen = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    async with served(engine) as client:
        reply = await client.post(URL, {**ASKED, "output_config": chosen})
    assert reply.status == 200, reply.content
    (request,) = engine.requests
    assert json.loads(request.entry.sampling.structured_output.json_schema) == {"type": "object"}


async def test_what_has_no_effect_is_named():
    tools = [ADD, {"type": "web_search_20250305", "name": "web_search"}]
    failed = {"type": "tool_result", "tool_use_id": "x", "is_error": True}
    body = {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [failed]}],
        "metadata": {"user_id": "u"},
        "thread": {"type": "create"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": tools,
    }
    # Without "</think>": nothing is known of its reasoning.
    engine = FakeEngine(answer(TEXT), chat_template="<tool_call>{{ tools }}{{ messages }}")
    async with served(engine) as client:
        reply = await client.post(URL, body, **{"anthropic-version": "2023-06-01"})
    assert reply.status == 200, reply.content
    ignored = "messages[0].content[0].is_error, metadata, thinking.budget_tokens, tools[1]"
    assert reply.headers["x-triptych-ignored-fields"] == ignored


def asked_with(block: dict[str, Any]) -> dict[str, Any]:
    return {**ASKED, "messages": [{"role": "user", "content": [block]}]}


async def test_a_wrong_body_is_an_error_that_names_its_field():
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"max_tokens": 5}, 400, "messages is missing"),
        ({**ASKED, "messages": []}, 400, "messages has 0 messages"),
        ({**ASKED, "model": "other"}, 404, "other"),
        ({**ASKED, "max_tokens": 0}, 400, "max_tokens is 0"),
        ({**ASKED, "temperature": 9}, 400, "temperature"),
        ({**ASKED, "stop_sequences": [""]}, 400, "stop_sequences"),
        ({**ASKED, "max_tokns": 1}, 400, "did you mean max_tokens"),
        ({**ASKED, "tool_choice": {"type": "any"}}, 400, "tool_choice.type"),
        ({**ASKED, "tools": [{**ADD, "name": "a b"}]}, 400, "tools[0].name"),
        ({**ASKED, "tools": [{"name": "add"}]}, 400, "tools[0].input_schema is missing"),
        ({**ASKED, "container": "c"}, 400, "there is no execution of code"),
        ({**ASKED, "thread": {"type": "resume", "id": "t"}}, 400, "there are no stored threads"),
        (asked_with({"type": "image"}), 400, "messages[0].content[0].type is 'image'"),
        (asked_with({}), 400, "messages[0].content[0].type is missing"),
        ({**ASKED, "messages": [{"role": "tool", "content": ""}]}, 400, "messages[0].role"),
        (
            {
                **ASKED,
                "tools": [{"type": "bash_20250124", "name": "bash"}],
                "tool_choice": {"type": "tool", "name": "bash"},
            },
            400,
            "tools[0].type is 'bash_20250124'",
        ),
    ]
    async with served(engine_of(TEXT)) as client:
        for body, status, says in wrong:
            reply = await client.post(URL, body)
            kind = "not_found_error" if status == 404 else "invalid_request_error"
            assert (reply.status, reply.body["type"], reply.body["error"]["type"]) == (status, "error", kind)
            assert says in reply.body["error"]["message"]
            assert reply.headers["request-id"] == reply.headers["x-request-id"]
        after = await client.post(URL, ASKED)
    assert after.status == 200


async def test_an_error_after_the_start_is_the_last_event():
    async with served(FakeEngine(failing, chat_template=TEMPLATE)) as client:
        whole = await client.post(URL, ASKED)
        streamed = await client.post(URL, {**ASKED, "stream": True})
    error = {"type": "error", "error": {"type": "api_error", "message": "logits are not finite"}}
    assert (whole.status, whole.body) == (500, error)
    assert streamed.status == 200
    assert events_of(streamed)[-1] == error


async def test_models_have_the_shape_of_anthropic_for_its_clients():
    version = {"anthropic-version": "2023-06-01"}
    async with served(engine_of(TEXT)) as client:
        listed = (await client.call("GET", "/v1/models", **version)).body
        one = (await client.call("GET", "/v1/models/tiny", **version)).body
    (info,) = listed.pop("data")
    assert info == one
    assert listed == {"first_id": "tiny", "last_id": "tiny", "has_more": False}
    assert (info["id"], info["type"], info["display_name"]) == ("tiny", "model", "tiny")
    assert info["created_at"].endswith("Z")


async def test_a_route_that_is_not_served_has_the_shape_of_its_api():
    async with served(engine_of(TEXT)) as client:
        batches = await client.post(f"{URL}/batches", {})
        read = await client.call("GET", URL)
    assert (batches.status, batches.body["error"]["type"]) == (404, "not_found_error")
    assert "run-batch" in batches.body["error"]["message"]
    assert (read.status, read.body["type"], read.headers["allow"]) == (405, "error", "POST")


async def test_errors_have_the_shape_of_the_api_that_the_headers_name():
    version = {"anthropic-version": "2023-06-01"}
    async with served(engine_of(TEXT)) as client:
        of_both = await client.call("GET", "/v1/models/nope", **version)
        of_none = await client.call("GET", "/v1/files", **version)
        of_openai = await client.post("/v1/chat/completions", {}, **version)
        plain = await client.call("GET", "/v1/models/nope")
    assert [(reply.body["type"], reply.body["error"]["type"]) for reply in (of_both, of_none)] == [
        ("error", "not_found_error")
    ] * 2
    assert of_none.headers["request-id"] == of_none.headers["x-request-id"]
    assert [set(reply.body) for reply in (of_openai, plain)] == [{"error"}] * 2


async def test_a_silent_stream_is_pinged():
    engine = FakeEngine(chat_template=TEMPLATE)
    async with served(engine, http_heartbeat_s=0.05) as client:
        connection = http.client.HTTPConnection(client.address, timeout=WAIT_S)
        with contextlib.closing(connection):
            body = json.dumps({**ASKED, "stream": True})
            await asyncio.to_thread(connection.request, "POST", URL, body)
            (request,) = await engine.wait_for_requests(1)
            with contextlib.closing(await asyncio.to_thread(connection.getresponse)) as response:
                assert await asyncio.to_thread(response.readline) == b"event: ping\n"
        await engine.wait(lambda: request.num_aborts > 0)


async def test_a_key_may_come_in_the_header_of_anthropic(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: ann, key: key-of-ann-0123456789, role: client}\n")
    async with served(engine_of(TEXT), api_keys=str(file)) as client:
        key = {"x-api-key": "key-of-ann-0123456789"}
        answers = [await client.post(URL, ASKED, **key), await client.call("GET", "/v1/models", **key)]
        refused = [
            await client.post(URL, ASKED),
            await client.post(URL, ASKED, **{"x-api-key": "another-key-0123456789"}),
            await client.post(URL, ASKED, **key, authorization="Bearer another-key-0123456789"),
        ]
    assert [reply.status for reply in answers] == [200, 200]
    assert [(reply.status, reply.body["error"]["type"]) for reply in refused] == [
        (401, "authentication_error")
    ] * 3
    assert [reply.body["type"] for reply in refused] == ["error"] * 3
