"""What a frontend is sent, and how often, by a clock that stands still between turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator_svc.membership.publisher import ChangeSignal, Publisher
from coordinator_svc.membership.registry import EngineRegistry
from coordinator_svc.membership.topology import Topology
from service_kit.clock import FakeClock
from tests.coordinator_svc.fakes import registration
from triptych.coordinator.v1 import coordinator_pb2, member_pb2


class Published:
    """A publisher at work, and what it has sent, which is acked at once unless it is refused."""

    def __init__(self, num_engines: int) -> None:
        self.clock = FakeClock(100.0)
        self.signal = ChangeSignal()
        self.topology = Topology(EngineRegistry(self.clock, lease_s=30.0), coordinator_epoch=5)
        self.sent: list[coordinator_pb2.FrontendSessionResponse] = []
        self.refuses = False
        self.publisher = Publisher(self.topology, self.signal, self.clock)
        for index in range(num_engines):
            one = registration(engine_id=f"e{index}", dp_group="g", dp_size=num_engines, dp_rank=index)
            one.lockstep = True
            self.topology.register_engine(one, index + 1)
            self.topology.join_group(one)

    async def write(self, message: coordinator_pb2.FrontendSessionResponse) -> None:
        self.sent.append(message)
        if self.refuses:
            self.publisher.take_nack(message.nonce)
        else:
            self.publisher.take_ack(message.nonce)

    def report(self, index: int, number: int, **fields: int | bool) -> None:
        load = member_pb2.EngineLoad(engine_epoch=11, step_number=number, num_running=number)
        report = coordinator_pb2.EngineReport(seq=number, load=load, **fields)  # type: ignore[arg-type]
        self.topology.take_report(f"e{index}", index + 1, report)

    async def turn(self, seconds: float = 0.0) -> None:
        """Let time pass, and let the publisher do what is due."""
        self.clock.advance(seconds)
        self.signal.notify()
        for _ in range(10):
            await asyncio.sleep(0)


@asynccontextmanager
async def publishing(num_engines: int = 1) -> AsyncIterator[Published]:
    one = Published(num_engines)
    running = asyncio.ensure_future(one.publisher.run(one.write, delay_s=0.0))
    await one.turn()
    assert one.sent.pop().HasField("snapshot")
    try:
        yield one
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_thousand_reports_a_second_are_ten_messages_of_which_the_last_has_the_newest() -> None:
    async with publishing() as one:
        for number in range(1, 1001):
            one.report(0, number)
            await one.turn(0.001)
        await one.turn(0.1)
        assert 9 <= len(one.sent) <= 11
        assert one.sent[-1].delta.loads[0].num_running == 1000


async def test_a_wave_is_told_at_once() -> None:
    async with publishing(num_engines=2) as one:
        one.report(0, 1, generation=3, wave=8)
        await one.turn()
        [message] = one.sent
        [state] = message.delta.waves
        assert (state.dp_group, state.wave, state.engines_running, state.generation) == ("g", 8, True, 3)
        one.report(1, 1, generation=3, wave=8)
        await one.turn()
        assert len(one.sent) == 1
        one.report(0, 2, generation=3, wave=9, wave_complete=True)
        one.report(1, 2, generation=3, wave=9, wave_complete=True)
        await one.turn()
        assert [state.engines_running for state in one.sent[-1].delta.waves] == [False]


async def test_a_message_that_a_frontend_refuses_is_followed_by_a_snapshot_once_a_second() -> None:
    async with publishing() as one:
        one.refuses = True
        await one.turn(5.0)
        assert [message.WhichOneof("message") for message in one.sent] == ["delta", "snapshot"]
        for _ in range(99):
            await one.turn(0.1)
        assert len(one.sent) in (11, 12)
        one.refuses = False
        await one.turn(1.0)
        await one.turn(5.0)
        assert [message.WhichOneof("message") for message in one.sent[-2:]] == ["snapshot", "delta"]
