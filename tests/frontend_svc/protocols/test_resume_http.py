"""Streams of events whose connection broke: the client gets the rest by Last-Event-ID, and nothing twice."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from frontend_svc.build import build_frontend
from frontend_svc.config import FrontendConfig
from tests.frontend_svc.fakes import AT_LENGTH, LONG_HEARTBEAT_S, FakeEngine, answer, serving
from tests.frontend_svc.protocols.raw_http import RawConnection, RawReply, connected, exchange, post, until
from tests.frontend_svc.token_source import TokenSource

TEXT = "the cat sat on the mat 日本 😀."
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
ASKED: dict[str, Any] = {
    "prompt": "the cat",
    "stream": True,
    "n": 2,
    "temperature": 1.0,
    "seed": 1,
    "return_token_ids": True,
    "stream_options": OPTIONS,
    "orphan_grace_ms": 5000,
    "request_id": "mine",
}


class Events:
    """What came of a stream, over all its connections."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.data: list[Any] = []
        self.num_done = 0

    def take(self, event: bytes) -> None:
        lines = dict(line.split(b": ", 1) for line in event.split(b"\n"))
        if lines[b"data"] == b"[DONE]":
            self.num_done += 1
            return
        self.ids.append(lines[b"id"].decode())
        self.data.append(json.loads(lines[b"data"]))

    def take_all(self, reply: RawReply) -> None:
        assert reply.status == 200, reply
        for event in reply.content.split(b"\n\n")[:-1]:
            self.take(event)

    def check(self, num_outputs: int = 2) -> dict[int, tuple[str, list[int]]]:
        """What there is of each output; every one ends once, and so does the stream."""
        assert len({(one["id"], one["created"], one["model"]) for one in self.data}) == 1
        assert self.num_done == 1
        numbers = [int(one.split(":")[1]) for one in self.ids]
        assert numbers == sorted(numbers)
        assert len(set(self.ids)) == len(self.ids)
        outputs: dict[int, tuple[str, list[int]]] = {index: ("", []) for index in range(num_outputs)}
        ends: Counter[int] = Counter()
        for one in self.data:
            for choice in one["choices"]:
                text, ids = outputs[choice["index"]]
                outputs[choice["index"]] = text + choice["text"], ids + choice.get("token_ids", [])
                ends[choice["index"]] += choice["finish_reason"] is not None
        assert set(ends.values()) == {1}
        assert [one["choices"] for one in self.data].count([]) == 1
        return outputs


async def read_events(connection: RawConnection, events: Events, count: int) -> None:
    """Read so many more events, each of which is a chunk."""
    if not events.data:
        await connection.reader.readuntil(b"\r\n\r\n")
    for _ in range(count):
        size = int(await connection.reader.readline(), 16)
        events.take((await connection.reader.readexactly(size)).removesuffix(b"\n\n"))
        await connection.reader.readline()


def rest(events: Events, request_id: str = "mine") -> bytes:
    lines = [
        f"GET /v1/streams/{request_id} HTTP/1.1",
        "host: localhost",
        f"last-event-id: {events.ids[-1]}",
        "",
        "",
    ]
    return "\r\n".join(lines).encode()


async def test_a_stream_that_broke_at_any_event_goes_on_without_loss_or_repetition():
    engine = FakeEngine(answer(TEXT))
    async with serving(engine, http_port=0) as (_, frontend):
        address = await frontend.servers.http.start()
        whole = Events()
        whole.take_all(await exchange(address, post(json.dumps(ASKED).encode())))
        expected = whole.check()
        for num_read in range(1, len(whole.data) + 1):
            events = Events()
            request_id = f"mine-{num_read}"
            asked = post(json.dumps({**ASKED, "request_id": request_id}).encode())
            async with connected(address) as connection:
                await connection.send(asked)
                await read_events(connection, events, num_read)
            # By either way.
            last = f"last-event-id: {events.ids[-1]}\r\n\r\n".encode()
            again = asked.replace(b"\r\n\r\n", b"\r\n" + last, 1)
            events.take_all(await exchange(address, again if num_read % 2 else rest(events, request_id)))
            assert events.check() == expected
            assert events.data[-1]["usage"] == whole.data[-1]["usage"]
            assert [one.get("usage") for one in events.data].count(None) == 0
        await frontend.servers.http.stop(0)
    assert {text for text, _ in expected.values()} == {TEXT}
    assert all(request.abort_reason is None for request in engine.requests)


@pytest.mark.parametrize("num_read", [None, 3])
async def test_log_probabilities_of_a_stream_are_joined_those_of_the_whole_answer(num_read):
    asked = {**ASKED, "logprobs": 2}
    if num_read is None:
        # The tokens of a prompt that is repeated count, too.
        asked |= {"prompt": ["the cat", "sat on"], "echo": True, "orphan_grace_ms": 0, "request_id": None}
    async with serving(FakeEngine(TokenSource()), http_port=0) as (_, frontend):
        address = await frontend.servers.http.start()
        whole = {name: value for name, value in asked.items() if name not in ("stream", "orphan_grace_ms")}
        reply = await exchange(address, post(json.dumps({**whole, "request_id": None}).encode()))
        expected = json.loads(reply.content)
        events = Events()
        if num_read is None:
            reply = await exchange(address, post(json.dumps(asked).encode()))
            events.data = [
                json.loads(event.removeprefix(b"data: ")) for event in reply.content.split(b"\n\n")[:-2]
            ]
        else:
            async with connected(address) as connection:
                await connection.send(post(json.dumps(asked).encode()))
                await read_events(connection, events, num_read)
            events.take_all(await exchange(address, rest(events)))
        await frontend.servers.http.stop(0)
    for index, choice in enumerate(expected["choices"]):
        parts = [one for event in events.data for one in event["choices"] if one["index"] == index]
        columns = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        assert len(columns) > 3
        joined = {name: [value for each in columns for value in each[name]] for name in columns[0]}
        assert joined == choice["logprobs"]
        assert "".join(part["text"] for part in parts) == choice["text"]


async def test_another_frontend_goes_on_with_a_stream_whose_frontend_is_gone():
    engine = FakeEngine()
    async with serving(engine, http_port=0) as (_, frontend):
        address = await frontend.servers.http.start()
        config = FrontendConfig(port=0, http_port=0, engine=(engine.address,), text_workers=1)
        doomed = build_frontend(config, heartbeat_s=LONG_HEARTBEAT_S)
        doomed.connect(await doomed.servers.public.start())
        first = await doomed.servers.http.start()
        await until(lambda: doomed.engines.directory.is_ready)
        events = Events()
        asked = {**ASKED, "n": 1, "temperature": 0.0}
        async with connected(first) as connection:
            await connection.send(post(json.dumps(asked).encode()))
            (request,) = await engine.wait_for_requests(1)
            engine.step({request: [300]}, cached={request: 1})
            await read_events(connection, events, 1)
            engine.step({request: [301]})
            await read_events(connection, events, 1)
            engine.step({request: [302]})
            await doomed.servers.public.stop(0)
            await doomed.close()
            await doomed.servers.http.stop(0)
        await until(lambda: request.session not in engine.sessions)
        async with connected(address) as connection:
            await connection.send(rest(events))
            await engine.wait(lambda: request.num_adoptions > 0)
            engine.step({request: [303]})
            engine.step({request: [304]}, finished={request: AT_LENGTH})
            events.take_all(await connection.reply())
        await frontend.servers.http.stop(0)
    assert events.check(1)[0][1] == [300, 301, 302, 303, 304]
    usage = events.data[-1]["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (5, len(request.prompt))


@pytest.mark.parametrize(
    ("fields", "path", "says"),
    [
        ({"stream": False}, "completions", "one answer cannot be resumed"),
        ({"prompt": ["a", "b"], "request_id": None}, "completions", "a batch cannot be resumed"),
        ({"prompt": None, "messages": [{"role": "user", "content": "a"}]}, "chat/completions", "not served"),
    ],
)
async def test_what_cannot_be_resumed_is_refused_by_name(fields, path, says):
    async with serving(FakeEngine(answer(TEXT)), http_port=0) as (_, frontend):
        address = await frontend.servers.http.start()
        body = json.dumps({**ASKED, **fields}).encode()
        reply = await exchange(address, post(body, path=f"/v1/{path}"))
        await frontend.servers.http.stop(0)
    assert (reply.status, reply.error["param"]) == (400, "orphan_grace_ms")
    assert says in reply.error["message"]


async def test_an_id_of_another_stream_or_of_none_is_refused():
    async with serving(FakeEngine(answer(TEXT)), http_port=0) as (_, frontend):
        address = await frontend.servers.http.start()
        events = Events()
        events.take_all(await exchange(address, post(json.dumps(ASKED).encode())))
        events.ids.append(events.ids[0])
        other = await exchange(address, rest(events, "other"))
        events.ids.append(events.ids[0][:-8])
        cut = await exchange(address, rest(events))
        await frontend.servers.http.stop(0)
    assert [one.status for one in (other, cut)] == [400, 400]
    assert other.error["param"] == cut.error["param"] == "last-event-id"
