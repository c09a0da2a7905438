from __future__ import annotations

import asyncio
from array import array

import pytest

from launcher.engines.async_client import AsyncEngineClient
from launcher.engines.core_client import EngineDead
from service_kit.errors import InvalidArgument
from tests.engine_svc.session.service_rig import ServiceRig, make_entry, serving
from tests.launcher.engines.rig import Gathered, ScriptedEngine, answer_of
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import engine_pb2, step_pb2

CLIENT = engine_pb2.ABORT_REASON_CLIENT
WAIT_S = 20.0


class Scripted:
    """A started client of scripted engines."""

    def __init__(self, num_engines: int = 1, **options) -> None:
        self.engines = [ScriptedEngine() for _ in range(num_engines)]
        self.client = AsyncEngineClient(
            [str(index) for index in range(num_engines)],
            connect=lambda address: self.engines[int(address)].channel(),
            **options,
        )

    async def __aenter__(self) -> Scripted:
        await self.client.start(timeout_s=WAIT_S)
        return self

    async def __aexit__(self, *error) -> None:
        await self.client.close()


async def test_a_thousand_requests_at_once_all_get_their_own_answer() -> None:
    rig = ServiceRig()
    async with serving(rig):
        client = AsyncEngineClient([rig.address])
        await client.start(timeout_s=WAIT_S)
        handles = {client.add(make_entry(number)): number for number in range(1, 1001)}
        gathered = Gathered()
        async with asyncio.timeout(60):
            while client.num_in_flight:
                gathered.take((await client.get_output()).columns)
        await client.close()
    assert gathered.tokens == {handle: answer_of(number) for handle, number in handles.items()}


async def test_a_refused_request_comes_back_with_its_error() -> None:
    rig = ServiceRig()
    async with serving(rig):
        client = AsyncEngineClient([rig.address])
        await client.start(timeout_s=WAIT_S)
        handle = client.add(make_entry(1, prompt=[5] * 500))
        output = await asyncio.wait_for(client.get_output(), WAIT_S)
        assert isinstance(output.rejected[handle], InvalidArgument)
        assert client.num_in_flight == 0
        await client.close()


async def test_requests_spread_and_an_abort_list_is_one_message_to_each_engine() -> None:
    async with Scripted(num_engines=2) as scripted:
        handles = [scripted.client.add(make_entry(number)) for number in range(1, 7)]
        scripted.client.abort([*handles, 999], CLIENT)
        for engine in scripted.engines:
            await engine.until_heard(5)  # hello, three requests, one abort
        aborted = [engine.aborts for engine in scripted.engines]
    assert [len(messages) for messages in aborted] == [1, 1]
    assert sorted(aborted[0][0] + aborted[1][0]) == handles
    added = [
        [entry.handle for message in engine.messages for entry in message.add.entries]
        for engine in scripted.engines
    ]
    assert [messages[0] for messages in aborted] == added


def step_of(handle: int, *, is_last: bool = False) -> step_pb2.Step:
    """One token of one request."""
    column = array("I", [handle]).tobytes()
    ending = step_pb2.StepFinished(row=0, reason=output_pb2.FINISH_REASON_LENGTH)
    finished = [ending] if is_last else []
    return step_pb2.Step(handles=column, num_tokens=b"\1", token_ids=column, finished=finished)


async def test_a_request_is_in_flight_until_its_end_has_been_read() -> None:
    async with Scripted(max_unread=3) as scripted:
        answered, refused = (scripted.client.add(make_entry(number)) for number in (1, 2))
        engine = scripted.engines[0]
        engine.send(step=step_of(answered))
        engine.send(step=step_of(answered, is_last=True))
        engine.send(add_rejected=engine_pb2.AddRejected(handle=refused))
        engine.send(step=step_of(answered))
        async with asyncio.timeout(WAIT_S):
            await _until_dead(scripted.client)  # by the fourth, so the three before it are there
        in_flight = []
        while scripted.client.num_in_flight:
            in_flight.append(scripted.client.num_in_flight)
            await asyncio.wait_for(scripted.client.get_output(), WAIT_S)
        assert in_flight == [2, 2, 1]


async def test_a_corrupt_frame_is_raised_in_every_waiter() -> None:
    async with Scripted() as scripted:
        waiters = [asyncio.ensure_future(scripted.client.get_output()) for _ in range(3)]
        scripted.engines[0].send_corrupt_step()
        done, _ = await asyncio.wait(waiters, timeout=WAIT_S)
        assert [str(waiter.exception()) for waiter in done] == [str(waiters[0].exception())] * 3
        assert all(isinstance(waiter.exception(), EngineDead) for waiter in waiters)


async def test_the_dead_message_is_raised_in_every_waiter_and_every_later_call() -> None:
    async with Scripted() as scripted:
        waiters = [asyncio.ensure_future(scripted.client.get_output()) for _ in range(2)]
        scripted.engines[0].send(dead=engine_pb2.Dead(reason="out of memory"))
        await asyncio.wait(waiters, timeout=WAIT_S)
        for waiter in waiters:
            assert isinstance(waiter.exception(), EngineDead)
            assert "out of memory" in str(waiter.exception())
        with pytest.raises(EngineDead, match="out of memory"):
            scripted.client.add(make_entry(1))
        with pytest.raises(EngineDead, match="out of memory"):
            scripted.client.abort([1], CLIENT)
        with pytest.raises(EngineDead, match="out of memory"):
            await scripted.client.get_output()


async def test_who_is_marked_dead_sends_nothing_more() -> None:
    async with Scripted() as scripted:
        waiter = asyncio.ensure_future(scripted.client.get_output())
        await asyncio.sleep(0)
        scripted.client.mark_dead("the process was killed")
        with pytest.raises(EngineDead, match="killed"):
            await asyncio.wait_for(waiter, WAIT_S)
        with pytest.raises(EngineDead, match="killed"):
            scripted.client.add(make_entry(1))
        assert len(scripted.engines[0].messages) == 1  # hello


async def test_outputs_that_nobody_reads_end_the_client_at_its_limit() -> None:
    rig = ServiceRig()
    async with serving(rig):
        client = AsyncEngineClient([rig.address], max_unread=3)
        await client.start(timeout_s=WAIT_S)
        for number in range(1, 5):
            client.add(make_entry(number, prompt=[5] * 500))
        async with asyncio.timeout(WAIT_S):
            await _until_dead(client)
        assert [len((await client.get_output()).rejected) for _ in range(3)] == [1, 1, 1]
        with pytest.raises(EngineDead, match="the limit is 3"):
            await client.get_output()
        await client.close()


async def test_an_engine_that_cannot_be_reached_is_told_by_start() -> None:
    def connect(address: str):
        raise OSError("no such socket")

    client = AsyncEngineClient(["nowhere"], connect=connect)
    with pytest.raises(EngineDead, match="no such socket"):
        await client.start(timeout_s=WAIT_S)
    await client.close()


async def _until_dead(client: AsyncEngineClient) -> None:
    while True:
        try:
            client.abort([], CLIENT)
        except EngineDead:
            return
        await asyncio.sleep(0)
