"""Outputs of an engine on their way to the requests of this frontend."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from frontend_svc.engines.connection.connection import EngineConnection
from frontend_svc.engines.connection.requests import EngineRequests
from frontend_svc.output.pace import DeliveryPace
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import add_pb2, session_pb2, step_pb2

NUM_ROWS = 5_000  # of each of two engines
# Each takes 50 us with its write: 3 ms, of the 50 that are allowed.
MAX_ROWS_A_TURN = 64
# gRPC accepts one call in so many.
NUM_TURNS = 2
# Each completes an answer, which takes a millisecond.
MAX_ENDS_A_TURN = 16


class CountingReceiver:
    """Counts rows of all requests of a test."""

    wants_logprobs = True
    has_stop_strings = False
    num_rows = 0

    def advance(self, token_ids: list[int], *_: Any) -> None:
        type(self).num_rows += 1


def engine_requests(pace: DeliveryPace) -> EngineRequests:
    session = SimpleNamespace(add=lambda entries: [], on_step=lambda columns: 0)
    ack = session_pb2.HelloAck(engine_id="a")
    connection = SimpleNamespace(ack=ack, session=session, stub=None, send=lambda message: None)
    return EngineRequests(
        "a:1", "f", cast(EngineConnection, connection), on_add=lambda engine_id: None, pace=pace
    )


def step_of(requests: EngineRequests, num_rows: int, *, has_logprobs: bool = False) -> step_pb2.Step:
    """A step with a token of each of so many new requests."""
    entries = [add_pb2.AddEntry() for _ in range(num_rows)]
    handles = requests.add(entries, [cast(Any, CountingReceiver()) for _ in entries], [])
    step = step_pb2.Step(
        handles=array("I", handles).tobytes(),
        num_tokens=bytes([1]) * num_rows,
        token_ids=array("I", range(num_rows)).tobytes(),
    )
    if has_logprobs:
        step.sampled_logprobs = array("f", [-1.0] * num_rows).tobytes()
        step.sampled_ranks = array("I", [1] * num_rows).tobytes()
    return step


async def rows_by_turn(*delivering: Coroutine[Any, Any, None]) -> list[int]:
    """How many rows are delivered in each turn of the event loop, until there are no more."""
    seen = [0]
    tasks = [asyncio.ensure_future(one) for one in delivering]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        seen.append(CountingReceiver.num_rows)
    await asyncio.gather(*tasks)
    return [after - before for before, after in itertools.pairwise(seen)]


@pytest.mark.parametrize("has_logprobs", [False, True])
async def test_steps_of_thousands_of_outputs_let_others_have_the_event_loop(monkeypatch, has_logprobs):
    monkeypatch.setattr(CountingReceiver, "num_rows", 0)
    pace = DeliveryPace()
    engines = [engine_requests(pace) for _ in range(2)]
    steps = [step_of(one, NUM_ROWS, has_logprobs=has_logprobs) for one in engines]
    turns = await rows_by_turn(*(one.on_step(step) for one, step in zip(engines, steps, strict=True)))
    assert CountingReceiver.num_rows == 2 * NUM_ROWS
    assert max(turns) <= MAX_ROWS_A_TURN
    having = [index for index, num_rows in enumerate(turns) if num_rows]
    assert min(after - before for before, after in itertools.pairwise(having)) >= NUM_TURNS


async def test_requests_that_end_together_let_others_have_the_event_loop(monkeypatch):
    monkeypatch.setattr(CountingReceiver, "num_rows", 0)
    requests = engine_requests(DeliveryPace())
    step = step_of(requests, 256)
    for row in range(256):
        step.finished.add(row=row, reason=output_pb2.FINISH_REASON_LENGTH)
    turns = await rows_by_turn(requests.on_step(step))
    assert CountingReceiver.num_rows == 256
    assert max(turns) == MAX_ENDS_A_TURN


async def test_outputs_of_many_short_steps_let_others_have_the_event_loop_as_often(monkeypatch):
    monkeypatch.setattr(CountingReceiver, "num_rows", 0)
    requests = engine_requests(DeliveryPace())
    steps = [step_of(requests, 1) for _ in range(10 * MAX_ROWS_A_TURN)]

    async def deliver() -> None:
        for step in steps:
            await requests.on_step(step)

    turns = await rows_by_turn(deliver())
    assert [num_rows for num_rows in turns if num_rows] == [MAX_ROWS_A_TURN] * 10
