"""What a frontend is sent, and how often, by a clock that stands still between turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator_svc.membership.load import MIN_MEMBERS_INTERVAL_S, MIN_PUBLISH_INTERVAL_S, PublishTimer
from coordinator_svc.membership.publisher import ChangeSignal, Publisher
from coordinator_svc.membership.registry import EngineRegistry
from coordinator_svc.membership.topology import Topology
from tests.coordinator_svc.fakes import registration
from triptych.coordinator.v1 import coordinator_pb2, member_pb2
from triptych_kit.clock import FakeClock


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


async def test_a_wave_is_published_at_once() -> None:
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


# What publishing must not cost: a wake-up for each report, or the same work again for each subscriber.


def topology_of(num_engines: int) -> Topology:
    topology = Topology(EngineRegistry(FakeClock(), lease_s=3.0), coordinator_epoch=5)
    for index in range(num_engines):
        topology.register_engine(registration(engine_id=f"e{index}"), index + 1)
    return topology


def report(topology: Topology, index: int, number: int) -> None:
    load = member_pb2.EngineLoad(engine_epoch=11, step_number=number, num_running=number)
    topology.take_report(f"e{index}", index + 1, coordinator_pb2.EngineReport(seq=number, load=load))


def test_subscribers_that_have_seen_the_same_get_the_same_delta() -> None:
    topology = topology_of(3)
    first, second = topology.seen(), topology.seen()
    report(topology, 1, 1)
    delta = topology.delta(first)
    assert topology.delta(second) is delta
    assert [load.num_running for load in delta.loads] == [1]


def test_a_cached_delta_is_not_sent_when_something_has_changed_since() -> None:
    topology = topology_of(2)
    seen = topology.seen()
    report(topology, 0, 1)
    early = topology.delta(seen)
    report(topology, 1, 2)
    late = topology.delta(seen)
    assert [load.num_running for load in early.loads] == [1]
    assert [load.num_running for load in late.loads] == [1, 2]
    topology.leave_engine("e0", 1)
    assert topology.delta(seen).removed_engine_ids == ["e0"]
    assert not early.removed_engine_ids


def test_a_frontend_that_has_seen_less_gets_more() -> None:
    topology = topology_of(2)
    old = topology.seen()
    report(topology, 0, 1)
    new = topology.seen()
    report(topology, 1, 1)
    assert [len(topology.delta(seen).loads) for seen in (old, new)] == [2, 1]


async def test_loads_wake_only_waiters_for_loads() -> None:
    signal = ChangeSignal()
    anything = asyncio.ensure_future(signal.wait(60.0))
    urgent = asyncio.ensure_future(signal.wait(60.0, loads_too=False))
    await asyncio.sleep(0)
    signal.notify_loads()
    await asyncio.wait_for(anything, 10.0)
    assert not urgent.done()
    signal.notify()
    await asyncio.wait_for(urgent, 10.0)


def test_loads_go_to_all_subscribers_at_the_same_moment() -> None:
    timers = {start: PublishTimer(start) for start in (7.003, 7.05, 7.0991)}
    due = {
        round(start + timer.wait_s(start, members_changed=False, loads_changed=True), 6)
        for start, timer in timers.items()
    }
    assert due == {7.1}


def test_a_timer_that_is_a_little_early_does_not_have_the_loads_sent_twice() -> None:
    timer = PublishTimer(6.95)
    timer.published(6.9998)
    wait_s = timer.wait_s(6.9998, members_changed=False, loads_changed=True)
    assert wait_s > 0.9 * MIN_PUBLISH_INTERVAL_S


def test_members_are_published_at_once_until_they_change_too_often_and_then_together() -> None:
    timer = PublishTimer(50.0)
    num_at_once = 0
    while timer.wait_s(50.0, members_changed=True, loads_changed=False) == 0:
        timer.published(50.0)
        num_at_once += 1
        assert num_at_once < 100
    assert num_at_once >= 3
    assert timer.wait_s(50.0, members_changed=True, loads_changed=False) <= MIN_MEMBERS_INTERVAL_S
    later = 50.0 + 100 * MIN_MEMBERS_INTERVAL_S
    assert timer.wait_s(later, members_changed=True, loads_changed=False) == 0
