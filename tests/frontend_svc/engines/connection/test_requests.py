"""Outputs of an engine on their way to the requests of this frontend."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from frontend_svc.engines.connection.connection import EngineConnection
from frontend_svc.engines.connection.requests import EngineRequests
from triptych.engine.v1 import add_pb2, session_pb2, step_pb2

NUM_ROWS = 10_000
# Rows between two turns of the event loop. Each takes 50 us with its write: 3 ms, of the 50 that are allowed.
MAX_ROWS_A_TURN = 64


class CountingReceiver:
    """Counts rows of all requests of a test."""

    wants_logprobs = True
    has_stop_strings = False
    num_rows = 0

    def advance(self, token_ids: list[int], *_: Any) -> None:
        type(self).num_rows += 1


@pytest.mark.parametrize("has_logprobs", [False, True])
async def test_a_step_of_ten_thousand_outputs_lets_others_have_the_event_loop(monkeypatch, has_logprobs):
    monkeypatch.setattr(CountingReceiver, "num_rows", 0)
    session = SimpleNamespace(add=lambda entries: [], on_step=lambda columns: 0)
    ack = session_pb2.HelloAck(engine_id="a")
    connection = SimpleNamespace(ack=ack, session=session, stub=None, send=lambda message: None)
    requests = EngineRequests("a:1", "f", cast(EngineConnection, connection), on_add=lambda engine_id: None)
    entries = [add_pb2.AddEntry() for _ in range(NUM_ROWS)]
    handles = requests.add(entries, [cast(Any, CountingReceiver()) for _ in entries], [])

    step = step_pb2.Step(
        handles=array("I", handles).tobytes(),
        num_tokens=bytes([1]) * NUM_ROWS,
        token_ids=array("I", range(NUM_ROWS)).tobytes(),
    )
    if has_logprobs:
        step.sampled_logprobs = array("f", [-1.0] * NUM_ROWS).tobytes()
        step.sampled_ranks = array("I", [1] * NUM_ROWS).tobytes()
    seen: list[int] = []

    async def watch() -> None:
        while not seen or seen[-1] < NUM_ROWS:
            seen.append(CountingReceiver.num_rows)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await requests.on_step(step)
    await watching
    assert seen[-1] == NUM_ROWS
    assert max(after - before for before, after in itertools.pairwise(seen)) <= MAX_ROWS_A_TURN
