"""Requests whose grammars are being compiled, while their session or their engine ends, pauses or drains."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from engine_svc.admin.lifecycle import EngineState
from engine_svc.convert.feature import WireFeatures
from engine_svc.core.errors import RequestFailed
from engine_svc.core.extras import Extras
from engine_svc.features.structured_output.extras import StructuredOutput
from engine_svc.features.structured_output.wire import StructuredOutputOfAdd
from engine_svc.loop.mailbox import Inbox, Prepared
from engine_svc.loop.pause import RunState
from engine_svc.loop.preparation import Preparations
from tests.engine_svc.loop.controlled_rig import ABORT as ABORTING
from tests.engine_svc.loop.controlled_rig import KEEP, WAIT, controlled, tokens_of
from tests.engine_svc.session.service_rig import (
    ABORT,
    LENGTH,
    StreamClient,
    make_entry,
    parked,
    served,
    until_finished,
)
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, session_pb2, utility_pb2
from triptych_kit.clock import MonotonicClock
from triptych_kit.errors import from_rpc_error

ERROR = output_pb2.FINISH_REASON_ERROR
RESUME = {"features": ["resume"]}
FAILURE = RequestFailed("RESOURCE_EXHAUSTED", "structured_output: too large")


class CompilingRanks:
    """One rank, which has compiled what it was sent when the test says so. Preparations count from 1."""

    num_preparing = 1

    def __init__(self) -> None:
        self.sent: list[Extras] = []
        self.dropped: list[str] = []
        self.is_stopped = False
        self.inbox: Inbox | None = None

    def prepare(self, number: int, request_id: str, extras: Extras, account: str, weight: int) -> None:
        self.sent.append(extras)

    def drop_prepared(self, request_id: str) -> None:
        self.dropped.append(request_id)

    def stop_preparing(self) -> None:
        self.is_stopped = True

    def answer(self, number: int, failure: RequestFailed | None = None) -> None:
        assert self.inbox is not None
        self.inbox.put(Prepared(number, failure))


@pytest.fixture
def ranks() -> CompilingRanks:
    return CompilingRanks()


def compiling(ranks: CompilingRanks) -> dict[str, Any]:
    """Options of an engine whose requests wait for these ranks."""
    return {
        "preparations": Preparations(ranks, MonotonicClock(), limit_s=600.0),
        "features": WireFeatures([StructuredOutputOfAdd(("llguidance",))]),
    }


def constrained(handle: int) -> add_pb2.AddEntry:
    return make_entry(handle, structured_output={"regex": "[0-9]+"})


async def test_a_drain_waits_for_a_request_that_is_compiled_and_for_one_that_cannot_be(ranks):
    async with controlled(**compiling(ranks)) as engine:
        ranks.inbox, client = engine.rig.engine.inbox, engine.frontend
        await client.add(constrained(1), constrained(2), make_entry(3))
        await client.until_ended(3)
        drain = asyncio.create_task(engine.rig.servicer.drain())
        await client.until(lambda: "draining" in client.kinds())
        ranks.answer(2, FAILURE)
        await client.until_ended(2)
        assert not drain.done()
        ranks.answer(1)
        await client.until_ended(1)
        await drain
    assert client.finished == {1: [LENGTH], 2: [ERROR], 3: [LENGTH]}
    assert client.tokens[1] == tokens_of(1, 5)
    assert [list(extras) for extras in ranks.sent] == [[StructuredOutput]] * 2
    assert ranks.is_stopped


async def test_at_the_end_of_a_drain_a_request_that_is_compiled_is_handed_on(ranks):
    async with controlled(**compiling(ranks)) as engine:
        client = engine.frontend
        await client.add(constrained(1))
        await client.flush()
        drain = asyncio.create_task(engine.rig.servicer.drain())
        await client.until(lambda: "draining" in client.kinds())
        engine.rig.engine.lifecycle.move_to(EngineState.STOPPED)
        await client.until(lambda: client.is_over)
        await drain
        assert client.error is not None
        assert from_rpc_error(client.error).reason == "ENGINE_DRAINED"
    assert client.finished == {}


async def test_a_request_is_compiled_while_its_session_has_no_stream(ranks):
    async with served(**compiling(ranks)) as (rig, stub):
        ranks.inbox, first = rig.engine.inbox, StreamClient(stub, "f")
        await first.open(**RESUME)
        await first.add(constrained(1), constrained(2))
        await first.flush()
        await first.close()
        await parked(rig, stub)
        ranks.answer(1)
        ranks.answer(2, FAILURE)
        await until_finished(stub, 2)
        last_seq = max(message.seq for message in first.received)
        second = StreamClient(stub, "f")
        await second.open(**RESUME, resume=session_pb2.ResumePoint(engine_epoch=7, last_seq=last_seq))
        await second.until_ended(1, 2)
        (failed,) = [end for message in second.received for end in message.step.finished if end.code]
    assert second.received[0].hello_ack.resume_ok
    assert (second.tokens[1], second.finished) == (tokens_of(1, 5), {1: [LENGTH], 2: [ERROR]})
    assert (failed.code, failed.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], FAILURE.message)


@pytest.mark.parametrize("how", ["abort", "goodbye", "lost"])
async def test_a_request_that_ends_while_it_is_compiled_is_dropped(ranks, how):
    async with served(**compiling(ranks)) as (rig, stub):
        ranks.inbox, client = rig.engine.inbox, StreamClient(stub, "f")
        await client.open()
        await client.add(constrained(1))
        await client.flush()
        if how == "abort":
            await client.abort(1)
            await client.until_ended(1)
            assert client.finished == {1: [ABORT]}
        elif how == "goodbye":
            await client.send(engine_pb2.ConnectRequest(goodbye=engine_pb2.Goodbye()))
        else:
            await client.close()
        stats = await until_finished(stub, 1)
        assert (stats.num_waiting, stats.num_running, len(ranks.dropped)) == (0, 0, 1)
        # The answer comes too late for it.
        ranks.answer(1)
        other = StreamClient(stub, "g")
        await other.open()
        await other.add(make_entry(5))
        await other.until_ended(5)
    assert other.tokens[5] == tokens_of(5, 5)


@pytest.mark.parametrize("mode", [KEEP, WAIT, ABORTING])
async def test_a_sleep_neither_waits_for_a_request_that_is_compiled_nor_lets_it_run(ranks, mode):
    async with controlled(**compiling(ranks)) as engine:
        ranks.inbox, client = engine.rig.engine.inbox, engine.frontend
        await client.add(constrained(1))
        await client.flush()
        await engine.call(sleep=utility_pb2.SleepCall(level=1, mode=mode))
        ranks.answer(1)
        await engine.pass_by()
        assert engine.rig.engine.run_state is RunState.ASLEEP
        assert client.finished == ({1: [ABORT]} if mode == ABORTING else {})
        assert engine.rig.executor.num_launched == 0
        await engine.call(wake=utility_pb2.WakeCall())
        await client.until_ended(1)
    assert client.tokens[1] == ([] if mode == ABORTING else tokens_of(1, 5))
    assert len(ranks.dropped) == 1
