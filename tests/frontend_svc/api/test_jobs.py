"""Turns of jobs: what their engine gets to know of their ends."""

from __future__ import annotations

import pytest

from tests.frontend_svc.api.test_chat import ADD, CALL, TEMPLATE, ask
from tests.frontend_svc.fakes import TOKENIZER, WAIT_S, FakeEngine, FakeRequest, answer, read_all, serving
from triptych.engine.v1 import session_pb2


def called(hint: session_pb2.FinishHint) -> str | None:
    return hint.tool_name if hint.HasField("tool_name") else None


@pytest.mark.parametrize(
    ("text", "tools", "name"), [(CALL, [ADD], "add"), ("no call", [ADD], ""), (CALL, [], None)]
)
async def test_the_engine_gets_to_know_the_tool_that_a_turn_calls(text, tools, name):
    engine = FakeEngine(answer(text), chat_template=TEMPLATE)
    async with serving(engine) as (client, _):
        async for _ in client.chat.Chat(ask(tools=tools, job_id="a"), timeout=WAIT_S):
            pass
        await client.chat.ChatOnce(ask(tools=tools, job_id="a"), timeout=WAIT_S)
        await engine.wait(lambda: len(engine.hints) == 2)
    assert [called(hint) for hint in engine.hints] == [name] * 2
    assert [hint.handle for hint in engine.hints] == [request.handle for request in engine.requests]


async def test_each_output_of_a_turn_has_a_hint_and_of_plain_text_no_call_is_known():
    engine = FakeEngine(answer("x"))
    async with serving(engine) as (client, _):
        await read_all(client.generate(job_id="a", n=2, temperature=1.0))
        await engine.wait(lambda: len(engine.hints) == 2)
    assert {hint.handle: called(hint) for hint in engine.hints} == {
        request.handle: None for request in engine.requests
    }


async def test_there_is_no_hint_of_a_last_turn_of_a_request_without_a_job_or_of_one_that_its_client_leaves():
    def script(engine: FakeEngine, request: FakeRequest) -> None:
        if request.entry.sampling.max_tokens == 7:
            engine.step({request: [5]})
        else:
            answer("x")(engine, request)

    engine = FakeEngine(script)
    async with serving(engine) as (client, _):
        await read_all(client.generate(job_id="a", is_last_step=True))
        await read_all(client.generate())
        left = client.generate(job_id="a", max_tokens=7)
        await left.read()
        left.cancel()
        await engine.wait(lambda: engine.received.count("abort") == 1)
        await read_all(client.generate(job_id="a"))
        await engine.wait(lambda: bool(engine.hints))
    assert [hint.handle for hint in engine.hints] == [engine.requests[-1].handle]


async def test_a_turn_that_a_stop_string_ends_is_aborted_before_the_hint():
    def script(engine: FakeEngine, request: FakeRequest) -> None:
        engine.step({request: TOKENIZER.encode("the cat sat").ids})

    engine = FakeEngine(script)
    async with serving(engine) as (client, _):
        await read_all(client.generate(job_id="a", stop=["cat"]))
        await engine.wait(lambda: bool(engine.hints))
    assert [kind for kind in engine.received if kind in ("abort", "finish_hint")] == ["abort", "finish_hint"]


async def test_turns_of_a_job_go_to_one_engine_unless_their_sessions_say_otherwise():
    engines = [FakeEngine(answer("x"), dp_rank=rank) for rank in range(2)]
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(2)
        counts = []
        for sessions in [""] * 8, [f"s{number}" for number in range(32)]:
            for session_id in sessions:
                await read_all(client.generate(job_id="a", session_id=session_id))
            counts.append(sorted(len(engine.requests) for engine in engines))
    assert counts[0] == [0, 8]
    assert counts[1][0] > 0
