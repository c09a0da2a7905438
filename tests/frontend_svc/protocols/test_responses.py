"""The Responses API: items and events of what a chat answers, and conversations that go on."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from typing import Any

import pytest

from tests.frontend_svc.fakes import AT_LENGTH, TOKENIZER, WAIT_S, FakeEngine, FakeRequest, answer, refusing
from tests.frontend_svc.protocols.test_openai import TEXT, HTTPClient, Reply, failing, served
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import engine_pb2

TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call> {{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.reasoning_content or '' }}|{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}|{{ call.function.name }}({{ call.function.arguments.a }})"
    "{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking %}<think>\n{% endif %}{% endif %}"
    "{# </think> #}"
)
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
URL = "/v1/responses"


def engine_of(text: str, **options: Any) -> FakeEngine:
    return FakeEngine(answer(text), chat_template=TEMPLATE, **options)


def prompt_of(request: FakeRequest) -> str:
    return TOKENIZER.decode(request.prompt, skip_special_tokens=False)


def events_of(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream, each under its own type."""
    found = []
    for block in reply.content.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(value: Any) -> Any:
    """What two answers to the same request have in common."""
    varying = ("id", "item_id", "call_id", "created_at", "completed_at")
    if isinstance(value, dict):
        return {name: without_ids(one) for name, one in value.items() if name not in varying}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


async def test_a_response_has_the_answer_and_repeats_its_request():
    engine = engine_of(TEXT)
    async with served(engine) as client:
        body = {
            "input": "the cat",
            "instructions": "be brief",
            "max_output_tokens": 50,
            "temperature": 0.5,
            "top_p": 0.9,
            "metadata": {"topic": "cats"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "user": "x",
            "return_token_ids": True,
        }
        reply = await client.post(URL, body)
        assert reply.status == 200, reply.content
        read = await client.call("GET", f"{URL}/{reply.body['id']}")
    (request,) = engine.requests
    found = reply.body
    prompt = "[system] |be brief\n[user] |the cat\n[assistant] "
    assert prompt_of(request) == prompt
    assert (request.entry.sampling.max_tokens, request.entry.sampling.temperature) == (50, 0.5)
    assert request.entry.external_request_id == found["id"]
    assert found["id"].startswith("resp_")
    assert found["output"][0]["id"].startswith("msg_")
    num_prompt, num_output = len(TOKENIZER.encode(prompt).ids), len(TOKENIZER.encode(TEXT).ids) + 1
    part = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    assert without_ids(found) == {
        "object": "response",
        "status": "completed",
        "model": "tiny",
        "output": [{"type": "message", "role": "assistant", "status": "completed", "content": [part]}],
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_output,
        },
        "error": None,
        "incomplete_details": None,
        "background": False,
        "instructions": "be brief",
        "max_output_tokens": 50,
        "metadata": {"topic": "cats"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": "low", "summary": None},
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 0.9,
        "truncation": "disabled",
        "token_ids": [*TOKENIZER.encode(TEXT).ids, found["token_ids"][-1]],
        "prompt_token_ids": TOKENIZER.encode(prompt).ids,
    }
    assert read.body == found
    assert reply.headers["x-triptych-ignored-fields"] == "reasoning.summary, user"


async def test_a_stream_has_an_event_for_each_change_of_each_item():
    text = f"the dog\n</think>\n\nI add.{CALL}"
    async with served(engine_of(text)) as client:
        body = {"input": "the cat", "tools": [ADD], **THINKS}
        whole = (await client.post(URL, body)).body
        reply = await client.post(URL, {**body, "stream": True})
    events = events_of(reply)
    assert reply.headers["content-type"].startswith("text/event-stream")
    kinds = [event["type"].removeprefix("response.") for event in events]
    in_order = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    assert in_order == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    final = events[-1]["response"]
    reasoning, message, call = final["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "the dog"}]
    assert reasoning["summary"] == []
    assert message["content"][0]["text"].strip() == "I add."
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == ("add", {"a": 1}, "completed")
    assert call["call_id"].startswith("call_")
    assert without_ids(final) == without_ids(whole)
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert (events[0]["response"]["output"], events[0]["response"]["usage"]) == ([], None)
    for index, item in enumerate(final["output"]):
        of_item = [event for event in events if event.get("item_id") == item["id"]]
        assert {event["output_index"] for event in of_item} == {index}
        deltas = "".join(event["delta"] for event in of_item if event["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if item is call else item["content"][0]["text"])
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert added[2] == {**call, "status": "in_progress", "arguments": ""}


async def test_a_broken_call_is_incomplete_and_no_part_of_the_conversation():
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": "1\n2"}}\n</tool_call>'
    engine = engine_of(broken)
    async with served(engine) as client:
        events = events_of(await client.post(URL, {"input": "the", "tools": [ADD], "stream": True}))
        response = events[-1]["response"]
        call, message = response["output"]
        assert (call["type"], call["status"]) == ("function_call", "incomplete")
        assert message["status"] == "completed"
        again = await client.post(URL, {"input": "a mat", "previous_response_id": response["id"]})
        assert again.status == 200, again.content
    text = message["content"][0]["text"]
    assert prompt_of(engine.requests[1]) == f"[user] |the\n[assistant] |{text}\n[user] |a mat\n[assistant] "


async def test_a_conversation_goes_on_by_its_id_as_by_its_items():
    engine = engine_of(f"the dog\n</think>\n\nI add.{CALL}")
    async with served(engine) as client:
        first = {"input": "the cat", "instructions": "old", "tools": [ADD], **THINKS}
        one = (await client.post(URL, first)).body
        call = one["output"][2]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        second = {"previous_response_id": one["id"], "instructions": "new", "input": [result], **THINKS}
        two = (await client.post(URL, second)).body
        assert two["previous_response_id"] == one["id"]
        await client.post(URL, {"previous_response_id": two["id"], "input": "a mat"})
        user = {"role": "user", "content": [{"type": "input_text", "text": "the cat"}]}
        await client.post(URL, {"instructions": "new", "input": [user, *one["output"], result], **THINKS})
    by_id, longer, by_items = [prompt_of(request) for request in engine.requests[1:]]
    content = one["output"][1]["content"][0]["text"]
    turns = f"[user] |the cat\n[assistant] the dog|{content}|add(1)\n[tool] |2\n"
    assert by_id == by_items == f"[system] |new\n{turns}[assistant] <think>\n"
    # Without tools the second answer has no call.
    assert two["output"][1]["content"][0]["text"] == f"I add.{CALL}"
    assert longer == f"{turns}[assistant] the dog|I add.{CALL}\n[user] |a mat\n[assistant] "


async def test_a_response_that_is_deleted_or_not_stored_cannot_be_read_or_continued():
    async with served(engine_of(TEXT)) as client:
        kept = (await client.post(URL, {"input": "the"})).body["id"]
        later = (await client.post(URL, {"input": "the", "previous_response_id": kept})).body["id"]
        unkept = (await client.post(URL, {"input": "the", "store": False})).body["id"]
        deleted = await client.call("DELETE", f"{URL}/{kept}")
        replies = [
            await client.call(method, f"{URL}/{one}{path}")
            for one in (kept, unkept, "resp_other")
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"))
        ]
        continued = await client.post(URL, {"input": "the", "previous_response_id": kept})
        still = await client.post(URL, {"input": "the", "previous_response_id": later})
    assert deleted.body == {"id": kept, "object": "response", "deleted": True}
    for reply in replies:
        error = reply.body["error"]
        assert (reply.status, error["type"], error["code"]) == (404, "not_found_error", "response_not_found")
        assert "is not known here: a frontend keeps its last 10000 responses" in error["message"]
    assert (continued.status, continued.body["error"]["param"]) == (404, "previous_response_id")
    assert continued.body["error"]["code"] == "previous_response_not_found"
    assert still.status == 200


async def test_limits_of_what_is_stored_are_options():
    for limit in ({"max_stored_responses": 2}, {"max_stored_response_bytes": 2800}):
        async with served(engine_of(TEXT), **limit) as client:
            made = [(await client.post(URL, {"input": "the"})).body["id"] for _ in range(3)]
            statuses = [(await client.call("GET", f"{URL}/{one}")).status for one in made]
        assert statuses == [404, 200, 200]
    async with served(engine_of(TEXT), max_stored_responses=0) as client:
        made = [(await client.post(URL, {"input": "the"})).body["id"]]
        assert (await client.call("GET", f"{URL}/{made[0]}")).status == 404


async def test_a_response_of_one_tenant_is_unknown_to_another(tmp_path):
    file = tmp_path / "keys.yaml"
    names = ("one", "other")
    file.write_text(
        "".join(f"- {{name: {name}, key: {name * 8}, role: client, tenant: {name}}}\n" for name in names)
    )
    mine, others = ({"authorization": f"Bearer {name * 8}"} for name in names)
    engine = FakeEngine(
        lambda engine, request: engine.step({request: TOKENIZER.encode("the").ids}), chat_template=TEMPLATE
    )
    async with served(engine, api_keys=str(file)) as client:
        async with streaming(client, {"input": "the"}, **mine) as next_event:
            response_id = (await next_event())["response"]["id"]
            path = f"{URL}/{response_id}"
            refused = [
                await client.call("GET", path, **others),
                await client.call("DELETE", path, **others),
                await client.post(f"{path}/cancel", {}, **others),
                await client.post(URL, {"input": "a", "previous_response_id": response_id}, **others),
            ]
            running = await client.call("GET", path, **mine)
            await client.post(f"{path}/cancel", {}, **mine)
        refused.append(await client.call("GET", path, **others))
        kept = await client.call("GET", path, **mine)
    assert [reply.status for reply in refused] == [404] * 5
    assert (running.body["status"], kept.body["status"]) == ("in_progress", "cancelled")
    assert engine.requests[0].num_aborts == 1


async def test_max_output_tokens_makes_a_response_incomplete():
    def script(engine: FakeEngine, request: FakeRequest) -> None:
        engine.step({request: TOKENIZER.encode(TEXT).ids}, finished={request: AT_LENGTH})

    async with served(FakeEngine(script, chat_template=TEMPLATE)) as client:
        whole = (await client.post(URL, {"input": "the"})).body
        events = events_of(await client.post(URL, {"input": "the", "stream": True}))
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in whole["output"]] == ["incomplete"]
    assert whole["completed_at"] is None
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]) == without_ids(whole)


async def test_an_error_is_a_status_or_the_last_event_and_nothing_is_stored():
    async with served(FakeEngine(failing, chat_template=TEMPLATE)) as client:
        whole = await client.post(URL, {"input": "the"})
        events = events_of(await client.post(URL, {"input": "the", "stream": True}))
        read = await client.call("GET", f"{URL}/{events[-1]['response']['id']}")
    assert (whole.status, whole.body["error"]["message"]) == (500, "logits are not finite")
    last = events[-1]["response"]
    assert (events[-1]["type"], last["status"]) == ("response.failed", "failed")
    assert last["error"] == {"code": "server_error", "message": "logits are not finite"}
    assert [item["status"] for item in last["output"]] == ["incomplete"]
    assert read.status == 404


@contextlib.asynccontextmanager
async def streaming(client: HTTPClient, body: dict[str, Any], **headers: str):
    """A stream that is open, and a function that reads its next event."""
    connection = http.client.HTTPConnection(client.address, timeout=WAIT_S)
    with contextlib.closing(connection):
        content = json.dumps({**body, "stream": True})
        await asyncio.to_thread(connection.request, "POST", URL, content, headers)
        response = await asyncio.to_thread(connection.getresponse)

        def read() -> dict[str, Any]:
            lines = [response.readline() for _ in range(3)]
            return json.loads(lines[1].removeprefix(b"data: "))

        yield lambda: asyncio.to_thread(read)


async def test_a_stream_can_be_read_and_cancelled_from_another_connection():
    engine = FakeEngine(
        lambda engine, request: engine.step({request: TOKENIZER.encode("the").ids}), chat_template=TEMPLATE
    )
    async with served(engine) as client, streaming(client, {"input": "the"}) as next_event:
        response_id = (await next_event())["response"]["id"]
        while (await next_event())["type"] != "response.output_text.delta":
            pass
        running = (await client.call("GET", f"{URL}/{response_id}")).body
        busy = await client.post(URL, {"input": "a", "previous_response_id": response_id})
        kept = await client.call("DELETE", f"{URL}/{response_id}")
        cancelled = (await client.post(f"{URL}/{response_id}/cancel", {})).body
        while (last := await next_event())["type"] != "response.incomplete":
            pass
        again = (await client.post(f"{URL}/{response_id}/cancel", {})).body
        read = (await client.call("GET", f"{URL}/{response_id}")).body
    assert (running["status"], running["output"][0]["status"]) == ("in_progress", "in_progress")
    assert running["output"][0]["content"][0]["text"] == "the"
    assert (busy.status, busy.body["error"]["param"]) == (400, "previous_response_id")
    assert (kept.status, kept.body["error"]["message"]) == (
        400, f"response '{response_id}' is in progress: cancel it first"
    )  # fmt: skip
    assert cancelled == last["response"] == again == read
    assert (cancelled["status"], cancelled["incomplete_details"]) == ("cancelled", None)
    assert cancelled["output"][0]["status"] == "incomplete"
    assert engine.requests[0].abort_reason == engine_pb2.ABORT_REASON_CLIENT


async def test_a_client_that_goes_away_aborts_its_stream_and_leaves_nothing():
    engine = FakeEngine(
        lambda engine, request: engine.step({request: TOKENIZER.encode("the").ids}), chat_template=TEMPLATE
    )
    async with served(engine) as client:
        async with streaming(client, {"input": "the"}) as next_event:
            response_id = (await next_event())["response"]["id"]
        await engine.wait(lambda: engine.requests[0].num_aborts > 0)
        assert (await client.call("GET", f"{URL}/{response_id}")).status == 404


async def test_tools_and_a_format_reach_the_chat():
    engine = engine_of("{}", structured_output_backends=("llguidance",))
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "id": {"const": 2**53 + 1}}}
    async with served(engine) as client:
        chosen = {"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}}
        found = (await client.post(URL, {"input": "the", "text": chosen})).body
        any_object = {"format": {"type": "json_object"}}
        await client.post(URL, {"input": "the", "text": any_object})
        no_call = {"input": "the", "tools": [ADD], "tool_choice": "none"}
        hidden = (await client.post(URL, no_call)).body
    assert found["text"] == chosen
    of_schema, of_object, of_tools = [request.entry.sampling for request in engine.requests]
    assert json.loads(of_schema.structured_output.json_schema) == schema
    assert of_object.structured_output.json_object
    assert not of_tools.HasField("structured_output")
    assert prompt_of(engine.requests[2]) == "[user] |the\n[assistant] "
    assert (hidden["tool_choice"], hidden["tools"]) == ("none", [{**ADD, "strict": False}])


async def test_what_codex_sends_beside_functions_is_taken_and_named():
    engine = engine_of(TEXT)
    body = {
        "input": [{**USER, "type": "message", "cache_control": {}}],
        "tools": [
            WEB,
            ADD,
            {"type": "namespace", "name": "mcp", "tools": [ADD]},
            {"type": "custom", "name": "x"},
        ],
        "tool_choice": "auto",
        "client_metadata": {"x": "y"},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "top_logprobs": 0,
        "stream": True,
    }
    async with served(engine) as client:
        reply = await client.post(URL, body)
    assert reply.status == 200, reply.content
    assert events_of(reply)[-1]["response"]["tools"] == [{**ADD, "strict": False}]
    assert reply.headers["x-triptych-ignored-fields"] == (
        "client_metadata, include, input[0].cache_control, tools[0], tools[2], tools[3]"
    )
    (request,) = engine.requests
    assert prompt_of(request).startswith("<tool_call> add\n[user]")


WEB = {"type": "web_search"}
USER = {"role": "user", "content": "the"}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "input is missing"),
        ({"input": 5}, "input", "Expected `str | array`"),
        ({"input": []}, "input", "input has 0 messages, must have 1.."),
        ({"input": [5]}, "input[0]", "Expected `object`"),
        ({"input": [USER, {"content": "a"}]}, "input[1].role", "input[1].role is missing"),
        ({"input": [{**USER, "role": "tool"}]}, "input[0].role", "is 'tool', must be one of "),
        ({"input": [{**USER, "x": 1}]}, "input[0].x", "input[0].x is not served"),
        (
            {"input": [{**USER, "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "'input_image', and images are not served: models here read text",
        ),
        (
            {"input": [{**USER, "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
            "input[0].content[0].text is missing",
        ),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0].type",
            "input[0].type is 'item_reference', which is not served; served are message, reasoning",
        ),
        (
            {"input": [USER, {"type": "function_call_output", "call_id": "", "output": "1"}]},
            "input[1]",
            "input[1]",
        ),
        ({"input": "the", "tools": [WEB], "tool_choice": "required"}, "tools[0].type", "demands a call"),
        ({"input": "the", "tools": [WEB], "tool_choice": WEB}, "tool_choice.type", "'web_search'"),
        ({"input": "the", "tools": [WEB, {**ADD, "name": ""}]}, "tools[1].name", "tools[1].name"),
        ({"input": "the", "tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is missing"),
        ({"input": "the", "tool_choice": "required"}, "tool_choice", "tool_choice demands a call, must come"),
        ({"input": "the", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is missing"),
        ({"input": "the", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0, must be"),
        ({"input": "the", "max_output_tokens": 1 << 70}, "max_output_tokens", "out of range"),
        ({"input": "the", "temperature": 9}, "temperature", "0..2"),
        ({"input": "the", "background": True}, "background", "background is not served: use stream"),
        ({"input": "the", "conversation": "c"}, "conversation", "use previous_response_id"),
        ({"input": "the", "truncation": "auto"}, "truncation", "truncation is 'auto', which is not served"),
        (
            {"input": "the", "include": ["message.output_text.logprobs"]},
            "include",
            "'message.output_text.logprobs'",
        ),
        ({"input": "the", "n": 2}, "n", "a response has one output"),
        ({"input": "the", "temprature": 1}, "temprature", "did you mean temperature?"),
    ],
)
async def test_a_wrong_body_is_an_error_with_its_own_field(body, param, says):
    engine = engine_of(TEXT, structured_output_backends=("llguidance",))
    async with served(engine) as client:
        reply = await client.post(URL, body)
        streamed = await client.post(URL, {**body, "stream": True})
    error = reply.body["error"]
    assert says in error["message"]
    assert (reply.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert streamed.body == reply.body


async def test_a_schema_that_the_engine_refuses_is_an_error_with_its_own_field():
    script = refusing("type 'x' is unknown", "CONSTRAINT_INVALID")
    engine = FakeEngine(script, chat_template=TEMPLATE, structured_output_backends=("llguidance",))
    body = {"input": "the", "text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}
    async with served(engine) as client:
        reply = await client.post(URL, body)
        streamed = await client.post(URL, {**body, "stream": True})
    error = reply.body["error"]
    assert (reply.status, error["type"], error["param"]) == (400, "invalid_request_error", "text.format")
    assert error["message"] == "type 'x' is unknown"
    assert (streamed.status, streamed.body) == (400, reply.body)


async def test_a_stored_response_is_not_streamed_again():
    async with served(engine_of(TEXT)) as client:
        found = (await client.post(URL, {"input": "the"})).body
        reply = await client.call("GET", f"{URL}/{found['id']}?stream=true")
    assert (reply.status, reply.body["error"]["param"]) == (400, "stream")


async def test_the_input_of_a_response_is_listed_as_items():
    items = [
        {"role": "user", "content": "what is 1 and 1"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    async with served(engine_of(TEXT)) as client:
        first = (await client.post(URL, {"input": items})).body
        later = (await client.post(URL, {"input": "go on", "previous_response_id": first["id"]})).body
        path = f"{URL}/{later['id']}/input_items"
        listed = (await client.call("GET", f"{path}?order=asc")).body
        newest = (await client.call("GET", f"{path}?limit=2")).body
        older = (await client.call("GET", f"{path}?limit=2&after={newest['last_id']}")).body
        wrong = [await client.call("GET", f"{path}?{query}") for query in ("limit=0", "order=x", "after=x")]
        missing = await client.call("GET", f"{URL}/resp_x/input_items")
    text = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    shown = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "what is 1 and 1"}]},
        items[1],
        {**items[2], "call_id": "c"},
        {**items[3], "call_id": "c"},
        {"type": "message", "role": "assistant", "content": [text]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ]
    found = [{name: value for name, value in item.items() if name != "id"} for item in listed["data"]]
    assert found == [{**item, "status": "completed"} for item in shown]
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert listed["first_id"] == listed["data"][0]["id"]
    assert [*newest["data"], *older["data"]] == listed["data"][:1:-1]
    assert (newest["has_more"], older["has_more"]) == (True, True)
    assert [reply.body["error"]["param"] for reply in wrong] == ["limit", "order", "after"]
    assert [missing.status, *(reply.status for reply in wrong)] == [404, 400, 400, 400]


async def test_the_tokens_of_an_input_are_counted_without_an_answer():
    engine = engine_of(TEXT)
    body = {"input": "the cat", "instructions": "be brief", "tools": [ADD]}
    async with served(engine) as client:
        counted = await client.post(f"{URL}/input_tokens", body)
        wrong = await client.post(f"{URL}/input_tokens", {**body, "conversation": "conv_1"})
        answered = (await client.post(URL, body)).body
    assert counted.body == {
        "object": "response.input_tokens",
        "input_tokens": answered["usage"]["input_tokens"],
    }
    assert len(engine.requests) == 1
    assert (wrong.status, wrong.body["error"]["param"]) == (400, "conversation")
    assert "use previous_response_id" in wrong.body["error"]["message"]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
AT_ONCE_OR_BEHIND = sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_OPENED_REASONING
UNSET = sampling_pb2.STRUCTURED_OUTPUT_START_UNSPECIFIED


@pytest.mark.parametrize(
    ("fields", "opening", "start"),
    [
        ({"tools": "strict"}, "", AT_ONCE_OR_BEHIND),
        ({"response_format": SCHEMA}, "", AT_ONCE_OR_BEHIND),
        (
            {"response_format": SCHEMA, **THINKS},
            "",
            sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING,
        ),
        ({"response_format": SCHEMA, "chat_template_kwargs": {"enable_thinking": False}}, "", UNSET),
        ({"response_format": SCHEMA}, "<think>\n\n</think>\n\n", UNSET),
        ({"tools": "strict", "tool_choice": "required"}, "", UNSET),
        (
            {"response_format": SCHEMA, "structured_outputs": {"start": "at_once"}},
            "",
            sampling_pb2.STRUCTURED_OUTPUT_START_AT_ONCE,
        ),
        (
            {"structured_outputs": {"regex": "a", "start": "after_opened_reasoning"}},
            "",
            AT_ONCE_OR_BEHIND,
        ),
    ],
)
async def test_reasoning_that_a_model_opens_itself_is_no_part_of_what_a_constraint_holds(
    fields: dict[str, Any], opening: str, start: int
) -> None:
    template = TEMPLATE.replace("[assistant] ", "[assistant] " + opening)
    engine = FakeEngine(answer("a mat"), chat_template=template, structured_output_backends=["llguidance"])
    body = {"messages": [{"role": "user", "content": "the"}], **fields}
    if "tools" in fields:
        function = {"name": "add", "parameters": ADD["parameters"], "strict": True}
        body["tools"] = [{"type": "function", "function": function}]
    async with served(engine) as client:
        reply = await client.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.content
    entry = engine.requests[0].entry
    assert entry.sampling.structured_output.start == start
    if start == AT_ONCE_OR_BEHIND:
        assert TOKENIZER.decode(list(entry.reasoning_options.start_token_ids)) == "<think>"
        assert TOKENIZER.decode(list(entry.reasoning_options.end_token_ids)) == "</think>"


async def test_options_of_structured_outputs_reach_the_engine():
    options = {"any_whitespace": True, "lenient": True, "backend": "llguidance", "start": "after_reasoning"}
    text_format = {"type": "json_schema", "name": "x", "schema": {}}
    message = {"messages": [{"role": "user", "content": "the cat"}]}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    engine = engine_of("{}", structured_output_backends=("llguidance", "xgrammar"))
    async with served(engine) as client:
        for body in (message | {"response_format": response_format}, message):
            own = {} if "response_format" in body else {"json": {}}
            chat = {**body, "structured_outputs": {**options, **own}}
            reply = await client.post("/v1/chat/completions", chat)
            assert reply.status == 200, reply.content
        body = {"input": "the cat", "text": {"format": text_format}, "structured_outputs": options}
        assert (await client.post(URL, body)).status == 200
        for name, wrong in (("backend", "outlines"), ("start", "late")):
            given = {"json": {}, name: wrong}
            reply = await client.post("/v1/chat/completions", {**message, "structured_outputs": given})
            assert (reply.status, reply.body["error"]["param"]) == (400, f"structured_outputs.{name}")
    assert len(engine.requests) == 3
    for request in engine.requests:
        sent = request.entry.sampling.structured_output
        assert (sent.any_whitespace, sent.lenient, sent.backend) == (True, True, "llguidance")
        assert sent.start == sampling_pb2.STRUCTURED_OUTPUT_START_AFTER_REASONING
        assert json.loads(sent.json_schema) == {}
