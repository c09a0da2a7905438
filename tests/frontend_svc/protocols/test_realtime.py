"""The Realtime API over a WebSocket: events of sessions, conversations and responses, and their limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from frontend_svc.config import FrontendConfig
from frontend_svc.protocols.openai.realtime.conversation import Conversation, ConversationLimits
from tests.frontend_svc.fakes import (
    AT_LENGTH,
    TOKENIZER,
    FakeEngine,
    FakeRequest,
    answer,
    refusing,
    serving,
)
from tests.frontend_svc.protocols.raw_http import exchange
from tests.frontend_svc.protocols.test_openai import TEXT, served
from tests.frontend_svc.protocols.test_responses import ADD, CALL, TEMPLATE, engine_of, prompt_of
from tests.frontend_svc.protocols.websocket_client import (
    CLOSE,
    PING,
    PONG,
    WebSocketClient,
    frame,
    opened,
    upgrade,
)
from triptych.engine.v1 import engine_pb2
from triptych_kit.errors import ResourceExhausted
from triptych_kit.shares import LimitPart, SharedLimit

URL = "/v1/realtime"


@contextlib.asynccontextmanager
async def session(engine: FakeEngine | None = None, **options: Any) -> AsyncIterator[WebSocketClient]:
    """A session behind its first event."""
    async with served(engine or engine_of(TEXT), **options) as client, opened(client.address, URL) as opening:
        assert (await opening.event())["type"] == "session.created"
        yield opening


def message(text: str, role: str = "user", **fields: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **fields}


async def create(client: WebSocketClient, item: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    await client.send({"type": "conversation.item.create", "item": item, **fields})
    return await client.until("conversation.item.done")


async def respond(client: WebSocketClient, **response: Any) -> list[dict[str, Any]]:
    await client.send({"type": "response.create", "response": response})
    return await client.until("response.done")


async def error_of(client: WebSocketClient, event: object) -> dict[str, Any]:
    await client.send(event)
    found = await client.event()
    assert found["type"] == "error", found
    error: dict[str, Any] = found["error"]
    return error


async def end(client: WebSocketClient) -> None:
    await client.connection.send(frame(b"", CLOSE))
    await client.close_code()
    assert await client.connection.is_closed()


def endless(engine: FakeEngine, request: FakeRequest) -> None:
    engine.step({request: TOKENIZER.encode("the").ids})


async def test_a_session_shows_what_it_is_and_what_an_update_has_changed():
    async with served() as client, opened(client.address, f"{URL}?model=tiny") as opening:
        created = await opening.event()
        await opening.send(
            {
                "type": "session.update",
                "session": {
                    "type": "realtime",
                    "instructions": "be brief",
                    "tools": [ADD],
                    "tool_choice": "required",
                    "max_output_tokens": 50,
                    "output_modalities": ["text"],
                    "temperature": 0.5,
                },
            }
        )
        updated = await opening.event()
        await opening.send({"type": "session.update", "session": {"instructions": "", "tools": []}})
        cleared = await opening.event()
    own = created["session"]
    assert (created["type"], own.pop("id")[:5]) == ("session.created", "sess_")
    assert own.pop("expires_at") > 0
    assert own == {
        "type": "realtime",
        "object": "realtime.session",
        "model": "tiny",
        "instructions": "",
        "max_output_tokens": "inf",
        "output_modalities": ["text"],
        "tools": [],
        "tool_choice": "auto",
        "tracing": None,
        "truncation": "disabled",
    }
    changed = {
        "instructions": "be brief",
        "tools": [ADD],
        "tool_choice": "required",
        "max_output_tokens": 50,
        "temperature": 0.5,
    }
    assert updated["session"] == {**created["session"], **changed, "id": updated["session"]["id"]} | {
        "expires_at": updated["session"]["expires_at"]
    }
    assert cleared["session"] == {**updated["session"], "instructions": "", "tools": []}
    assert len({event["event_id"] for event in (created, updated, cleared)}) == 3


async def test_a_response_has_its_events_in_order_and_its_items_are_of_the_conversation():
    engine = engine_of(TEXT)
    async with session(engine) as client:
        added, done = await create(client, message("the cat"))
        events = await respond(client, instructions="be brief", max_output_tokens=50, metadata={"a": "b"})
    (request,) = engine.requests
    prompt = "[system] |be brief\n[user] |the cat\n[assistant] "
    assert prompt_of(request) == prompt
    assert request.entry.sampling.max_tokens == 50
    assert (added["item"], added["previous_item_id"]) == (done["item"], None)
    kinds = [event["type"] for event in events]
    assert [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind] == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    by_kind = {event["type"]: event for event in events}
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == TEXT == by_kind["response.output_text.done"]["text"]
    response = by_kind["response.done"]["response"]
    item = response["output"][0]
    at = {"response_id": response["id"], "item_id": item["id"], "output_index": 0, "content_index": 0}
    assert at.items() <= by_kind["response.output_text.delta"].items()
    assert by_kind["response.content_part.done"]["part"] == {"type": "text", "text": TEXT}
    of_conversation = by_kind["conversation.item.done"]
    assert (of_conversation["item"], of_conversation["previous_item_id"]) == (item, added["item"]["id"])
    assert by_kind["response.created"]["response"]["status"] == "in_progress"
    num_prompt, num_output = len(TOKENIZER.encode(prompt).ids), len(TOKENIZER.encode(TEXT).ids) + 1
    assert response == {
        "object": "realtime.response",
        "id": request.entry.external_request_id,
        "status": "completed",
        "status_details": None,
        "output": [
            {
                "id": item["id"],
                "object": "realtime.item",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": TEXT}],
            }
        ],
        "conversation_id": response["conversation_id"],
        "output_modalities": ["text"],
        "max_output_tokens": 50,
        "metadata": {"a": "b"},
        "usage": {
            "total_tokens": num_prompt + num_output,
            "input_tokens": num_prompt,
            "output_tokens": num_output,
            "input_token_details": {
                "text_tokens": num_prompt,
                "audio_tokens": 0,
                "image_tokens": 0,
                "cached_tokens": 16,
                "cached_tokens_details": {"text_tokens": 16, "audio_tokens": 0, "image_tokens": 0},
            },
            "output_token_details": {"text_tokens": num_output, "audio_tokens": 0},
        },
    }


async def test_turns_go_on_with_the_conversation_as_one_job_of_the_session():
    engine = engine_of(TEXT)
    async with served(engine) as client, opened(client.address, URL) as opening:
        session_id = (await opening.event())["session"]["id"]
        for text in ("the cat", "the dog"):
            await create(opening, message(text))
            await respond(opening)
    assert prompt_of(engine.requests[1]) == (
        f"[user] |the cat\n[assistant] |{TEXT}\n[user] |the dog\n[assistant] "
    )
    assert [request.entry.job_id for request in engine.requests] == [session_id] * 2


async def test_a_call_of_a_function_is_made_answered_and_continued():
    engine = engine_of(f"I add.{CALL}")
    async with session(engine) as client:
        await client.send({"type": "session.update", "session": {"type": "realtime", "tools": [ADD]}})
        await client.event()
        await create(client, message("add"))
        events = await respond(client)
        _, call = events[-1]["response"]["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        (added, _) = await create(client, output)
        await respond(client, tool_choice="none")
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert json.loads("".join(event["delta"] for event in deltas)) == {"a": 1}
    assert {event["call_id"] for event in (*deltas, done)} == {call["call_id"]}
    assert (done["name"], done["arguments"]) == ("add", call["arguments"])
    assert (call["type"], call["name"], call["status"]) == ("function_call", "add", "completed")
    assert added["item"].items() > output.items()
    assert added["previous_item_id"] == call["id"]
    assert prompt_of(engine.requests[1]).endswith(
        "[user] |add\n[assistant] |I add.|add(1)\n[tool] |2\n[assistant] "
    )


async def test_a_response_is_cancelled_and_the_next_one_has_what_was_said():
    engine = FakeEngine(endless, chat_template=TEMPLATE)
    async with session(engine) as client:
        await create(client, message("the"))
        await client.send({"type": "response.create"})
        created = (await client.until("response.output_text.delta"))[0]
        busy = await error_of(client, {"type": "response.create", "event_id": "mine"})
        await client.send({"type": "response.cancel", "response_id": created["response"]["id"]})
        response = (await client.until("response.done"))[-1]["response"]
        idle = await error_of(client, {"type": "response.cancel"})
        engine.script = answer(TEXT)
        await respond(client)
    assert (busy["code"], busy["event_id"]) == ("conversation_already_has_active_response", "mine")
    assert (response["status"], response["id"]) == ("cancelled", created["response"]["id"])
    assert response["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 1
    assert idle["code"] == "response_cancel_not_active"
    assert engine.requests[0].abort_reason == engine_pb2.ABORT_REASON_CLIENT
    assert prompt_of(engine.requests[1]) == "[user] |the\n[assistant] |the\n[assistant] "


async def test_a_response_that_is_cancelled_at_once_ends_as_cancelled():
    engine = FakeEngine(endless, chat_template=TEMPLATE)
    async with session(engine) as client:
        await create(client, message("the"))
        await client.connection.send(
            frame(b'{"type": "response.create"}') + frame(b'{"type": "response.cancel"}')
        )
        events = await client.until("response.done")
    assert events[-1]["response"]["status"] == "cancelled"


async def test_a_response_at_its_limit_of_tokens_is_incomplete():
    def script(engine: FakeEngine, request: FakeRequest) -> None:
        engine.step({request: TOKENIZER.encode("the cat").ids}, finished={request: AT_LENGTH})

    async with session(FakeEngine(script, chat_template=TEMPLATE)) as client:
        await create(client, message("the"))
        response = (await respond(client, max_output_tokens=2))[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


async def test_reasoning_has_no_events():
    async with session(engine_of("<think>\nthe dog\n</think>\n\nthe cat")) as client:
        await create(client, message("the"))
        events = await respond(client)
    (item,) = events[-1]["response"]["output"]
    assert item["content"] == [{"type": "output_text", "text": "the cat"}]
    assert {event["output_index"] for event in events if "output_index" in event} == {0}


async def test_items_are_inserted_read_and_deleted_by_id():
    engine = engine_of(TEXT)
    async with session(engine) as client:
        await create(client, message("c", id="c"))
        first = await create(client, message("a", "system", id="a"), previous_item_id="root")
        second = await create(client, message("b", "assistant", id="b"), previous_item_id="a")
        await client.send({"type": "conversation.item.retrieve", "item_id": "b"})
        read = await client.event()
        await client.send({"type": "conversation.item.delete", "item_id": "c"})
        deleted = await client.event()
        gone = await error_of(client, {"type": "conversation.item.retrieve", "item_id": "c"})
        twice = await error_of(client, {"type": "conversation.item.create", "item": message("x", id="a")})
        await respond(client)
    assert [one["previous_item_id"] for one in (first[0], second[0])] == [None, "a"]
    assert read["item"] == second[0]["item"]
    assert (deleted["type"], deleted["item_id"]) == ("conversation.item.deleted", "c")
    assert (gone["code"], gone["param"]) == ("item_not_found", "item_id")
    assert (twice["type"], twice["param"]) == ("conflict_error", "item.id")
    assert prompt_of(engine.requests[0]) == "[system] |a\n[assistant] |b\n[assistant] "


async def test_a_response_apart_answers_its_own_input_and_leaves_the_conversation():
    engine = engine_of(TEXT)
    async with session(engine) as client:
        await create(client, message("a", id="a"))
        await create(client, message("b"))
        asked = [{"type": "item_reference", "id": "a"}, message("c")]
        events = await respond(client, conversation="none", input=asked)
        await respond(client)
    assert not [event for event in events if event["type"].startswith("conversation.")]
    assert events[-1]["response"]["conversation_id"] is None
    assert prompt_of(engine.requests[0]) == "[user] |a\n[user] |c\n[assistant] "
    assert prompt_of(engine.requests[1]) == "[user] |a\n[user] |b\n[assistant] "


REFUSED: list[tuple[Any, str, str]] = [
    (b"{", "invalid_argument", "type"),
    (b"[]", "invalid_argument", "type"),
    (b'{"type": ' + b"[" * 100_000, "invalid_argument", "type"),
    ({"type": "session.create"}, "invalid_argument", "type"),
    ({"type": "input_audio_buffer.append", "audio": "AA=="}, "unimplemented", "type"),
    ({"type": "input_audio_buffer.commit"}, "unimplemented", "type"),
    ({"type": "output_audio_buffer.clear"}, "unimplemented", "type"),
    ({"type": "session.update"}, "invalid_argument", "session"),
    ({"type": "session.update", "session": {"audio": {"input": {}}}}, "unimplemented", "session.audio"),
    ({"type": "session.update", "session": {"type": "transcription"}}, "unimplemented", "session.type"),
    (
        {"type": "session.update", "session": {"output_modalities": ["audio"]}},
        "unimplemented",
        "session.output_modalities",
    ),
    (
        {"type": "session.update", "session": {"truncation": "auto"}},
        "unimplemented",
        "session.truncation",
    ),
    ({"type": "session.update", "session": {"model": "other"}}, "failed_precondition", "session.model"),
    (
        {"type": "session.update", "session": {"instruction": "x"}},
        "invalid_argument",
        "session.instruction",
    ),
    (
        {"type": "session.update", "session": {"tools": [{"type": "function"}]}},
        "invalid_argument",
        "session.tools[0].name",
    ),
    (
        {"type": "session.update", "session": {"max_output_tokens": "many"}},
        "invalid_argument",
        "session.max_output_tokens",
    ),
    ({"type": "conversation.item.create", "item": {"type": "x"}}, "unimplemented", "item.type"),
    (
        {
            "type": "conversation.item.create",
            "item": {"type": "message", "role": "user", "content": [{"type": "input_audio"}]},
        },
        "unimplemented",
        "item.content[0].type",
    ),
    (
        {"type": "conversation.item.create", "item": message("x"), "previous_item_id": "none"},
        "item_not_found",
        "previous_item_id",
    ),
    ({"type": "conversation.item.create", "item": message("x", id="a b")}, "invalid_argument", "item.id"),
    (
        {"type": "response.create", "response": {"input": [{"type": "item_reference", "id": "x"}]}},
        "item_not_found",
        "response.input[0].id",
    ),
]


async def test_an_event_that_is_refused_is_answered_by_name_and_the_session_goes_on():
    async with session() as client:
        for index, (event, code, param) in enumerate(REFUSED):
            event_id = f"event {index}" if isinstance(event, dict) else None
            await client.send({**event, "event_id": event_id} if event_id else event)
            error = (await client.event())["error"]
            assert (error["code"], error["param"], error["event_id"]) == (code, param, event_id), error
        await client.send({"type": "session.update", "session": {}})
        await client.until("session.updated")


@pytest.mark.parametrize(
    ("in_session", "in_response", "param"),
    [
        ({"temperature": -1}, {}, "session.temperature"),
        ({}, {"temperature": -1}, "response.temperature"),
        ({}, {"input": []}, "response.input"),
    ],
)
async def test_a_response_that_is_refused_names_the_field_where_it_was_set(in_session, in_response, param):
    async with session() as client:
        await client.send({"type": "session.update", "session": in_session})
        await client.event()
        await create(client, message("the"))
        created, error, done = await respond(client, **in_response)
    assert created["type"] == "response.created"
    assert (error["type"], error["error"]["param"]) == ("error", param)
    assert done["response"]["status"] == "failed"
    details = {name: error["error"][name] for name in ("type", "code", "message")}
    assert done["response"]["status_details"] == {"type": "failed", "error": details}


async def test_a_response_that_its_engine_refuses_fails_and_the_session_goes_on():
    engine = FakeEngine(refusing("no room", "NO_ROOM"), chat_template=TEMPLATE)
    async with session(engine) as client:
        await create(client, message("the"))
        _, error, done = await respond(client)
        engine.script = answer(TEXT)
        assert (await respond(client))[-1]["response"]["status"] == "completed"
    assert error["error"]["code"] == "no_room"
    assert (done["response"]["status"], done["response"]["output"]) == ("failed", [])


async def test_a_client_that_goes_away_aborts_its_response():
    engine = FakeEngine(endless, chat_template=TEMPLATE)
    async with served(engine) as client:
        async with opened(client.address, URL) as opening:
            await create(opening, message("the"))
            await opening.send({"type": "response.create"})
            await opening.until("response.output_text.delta")
        await engine.wait(lambda: engine.requests[0].num_aborts > 0)


async def test_a_session_that_is_idle_is_closed_and_one_with_a_response_is_not():
    engine = FakeEngine(endless, chat_template=TEMPLATE)
    async with session(engine, realtime_idle_s=0.3) as client:
        await create(client, message("the"))
        await client.send({"type": "response.create"})
        await client.until("response.output_text.delta")
        await asyncio.sleep(0.7)
        await client.send({"type": "response.cancel"})
        await client.until("response.done")
        error = (await client.event())["error"]
        assert (error["code"], await client.close_code()) == ("session_idle", 1001)


async def test_a_silent_session_has_pings_and_is_idle_all_the_same():
    async with session(http_heartbeat_s=0.1, realtime_idle_s=0.8) as client:
        frames = [await client.frame()]
        while frames[-1] == (PING, b""):
            await client.connection.send(frame(b"", PONG))
            frames.append(await client.frame())
    assert len(frames) > 1
    assert json.loads(frames[-1][1])["error"]["code"] == "session_idle"


async def test_one_client_has_no_more_sessions_than_its_limit():
    async with served(realtime_max_sessions=1) as client:
        async with opened(client.address, URL) as first:
            await first.event()
            refused = await exchange(client.address, upgrade(URL))
            assert refused is not None
            assert (refused.status, refused.error["code"]) == (429, "too_many_sessions")
            assert "has 1 sessions, the limit is 1" in refused.error["message"]
            await end(first)
        async with opened(client.address, URL) as again:
            await again.event()


async def test_a_conversation_that_is_too_long_takes_no_more_items():
    async with session() as client:
        large = message("x" * 1_000_000)
        while True:
            await client.send({"type": "conversation.item.create", "item": large})
            event = await client.event()
            if event["type"] == "error":
                break
            await client.event()
            item_id = event["item"]["id"]
        assert event["error"]["code"] == "conversation_too_long"
        await client.send({"type": "conversation.item.delete", "item_id": item_id})
        assert (await client.event())["type"] == "conversation.item.deleted"
        await create(client, large)


def test_conversations_of_one_account_leave_others_their_share_of_all_bytes():
    held, limits = SharedLimit(1000), ConversationLimits()
    first, second = (Conversation(limits, LimitPart(held, account, 1)) for account in ("a", "b"))
    item = {"id": "i", "text": "x" * 600}
    first.create(item, None)
    with pytest.raises(ResourceExhausted, match="all conversations have"):
        first.create({**item, "id": "j"}, None)
    second.create({"id": "k", "text": "x" * 400}, None)
    first.replace({"id": "i"})
    first.append({"id": "j"})
    first.delete("i")
    assert held.total > 0
    for conversation in (first, second):
        conversation.clear()
    assert held.total == 0


async def test_an_event_that_is_too_long_closes_the_session():
    async with session() as client:
        await client.send(b" " * (1024 * 1024 + 1))
        assert await client.close_code() == 1009


@pytest.mark.parametrize(
    ("path", "status", "code", "param"),
    [
        (f"{URL}?model=other", 404, "model_not_found", "model"),
        (f"{URL}?model=tiny&intent=transcription", 400, "unimplemented", "intent"),
        (f"{URL}?call_id=x", 400, "unimplemented", "call_id"),
        (f"{URL}/client_secrets", 404, "unknown_url", None),
    ],
)
async def test_a_session_that_cannot_be_opened_is_refused_before_the_upgrade(path, status, code, param):
    async with served() as client:
        reply = await exchange(client.address, upgrade(path))
        assert reply is not None
        assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param)


async def test_a_page_of_another_site_opens_no_session():
    async with served() as client:
        reply = await exchange(client.address, upgrade(URL, "origin: http://example.com"))
        assert reply is not None
        assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")


async def test_a_session_is_counted_as_a_call_of_its_route():
    async with served() as client:
        async with opened(client.address, URL) as opening:
            await opening.event()
            during = (await client.call("GET", "/metrics")).content.decode()
            await end(opening)
        after = (await client.call("GET", "/metrics")).content.decode()
    assert 'triptych_frontend_sessions_open{api="realtime"} 1' in during
    assert 'triptych_frontend_sessions_open{api="realtime"} 0' in after
    assert 'requests_total{handler="/v1/realtime",method="GET",status="1xx"} 1' in after


async def test_a_frontend_that_drains_opens_no_session_and_ends_those_that_are_open():
    async with serving(engine_of(TEXT), http_port=0) as (_, frontend):
        assert frontend.servers.http is not None
        address = await frontend.servers.http.start()
        async with opened(address, URL) as client:
            await client.event()
            await create(client, message("the"))
            await frontend.drain()
            refused = await exchange(address, upgrade(URL))
            _, error, done = await respond(client)
            stopping = asyncio.ensure_future(frontend.servers.http.stop(1.0))
            assert await client.close_code() == 1001
        await stopping
    assert refused is not None
    assert (refused.status, refused.error["code"]) == (503, "draining")
    assert (error["error"]["code"], done["response"]["status"]) == ("draining", "failed")


@pytest.mark.parametrize(
    ("options", "message_"),
    [
        ({"realtime_max_sessions": -1}, "realtime_max_sessions -1 is negative"),
        ({"realtime_idle_s": 0}, "realtime_idle_s 0 is not in 0..2000000, without 0"),
    ],
)
def test_options_of_sessions_are_checked(options: dict[str, Any], message_: str):
    with pytest.raises(ValueError, match=message_):
        FrontendConfig(engine=("127.0.0.1:1",), **options)
