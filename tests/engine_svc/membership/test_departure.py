"""An engine that ends leaves its group in order where that can be, and at once where it cannot."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from engine_svc.admin.lifecycle import EngineState, Lifecycle
from engine_svc.admin.served_engine import LoadedCore, ServedEngine
from engine_svc.core.facts import EngineIdentity
from engine_svc.data_parallel.driver import RankStatus
from engine_svc.data_parallel.wave import LockstepState
from engine_svc.membership.departure import Departure
from tests.engine_svc.data_parallel.lockstep_rig import PATIENCE_S, Cluster, Rank
from tests.engine_svc.fakes import expected_tokens
from tests.engine_svc.loop.test_engine import prompt_of
from tests.engine_svc.session.service_rig import make_facts
from triptych_kit.clock import MonotonicClock


class Leaver:
    """The I/O side of one rank, whose coordinator is there, and what becomes of it."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.engine = ServedEngine(
            identity=EngineIdentity("engine-b", 7, "test", dp_rank=1, dp_size=2),
            artifacts=(),
            lifecycle=Lifecycle(),
            inbox=rank.inbox,
            stats_snapshot=rank.stats_snapshot,
            clock=MonotonicClock(),
        )
        loop = asyncio.get_running_loop()

        def on_status(rank_status: RankStatus) -> None:
            loop.call_soon_threadsafe(lambda: self.engine.note_rank_status(rank_status))

        rank.driver.subscribe(on_status)
        core = LoadedCore(make_facts(), refusal=lambda request: None, prepare=lambda request: None)
        self.engine.become_ready(replace(core, lockstep=rank.driver))
        self.engine.note_rank_status(rank.driver.rank_status)
        self.engine.note_member(True)
        self.is_dry = asyncio.Event()
        self.is_dry.set()
        self.num_stops = 0
        self.was_awaited = False  # when its sessions ended
        self.is_over = asyncio.Event()
        self.departure = Departure(self.engine, until_dry=self._until_dry, stop_process=self._stop)

    @property
    def state(self) -> EngineState:
        return self.engine.lifecycle.state

    def end(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.departure.end(self._end_sessions))

    async def _until_dry(self) -> None:
        await self.is_dry.wait()

    async def _end_sessions(self) -> None:
        self.was_awaited = self.rank.driver.rank_status.is_awaited
        if self.state is EngineState.DRAINING:
            self.engine.lifecycle.move_to(EngineState.STOPPED)
        self.is_over.set()

    def _stop(self) -> None:
        self.num_stops += 1


@contextlib.asynccontextmanager
async def a_leaver(size: int = 2) -> AsyncIterator[tuple[Cluster, Leaver]]:
    with _cluster(size) as cluster:
        yield cluster, Leaver(cluster.ranks[-1])


@contextlib.contextmanager
def _cluster(size: int) -> Iterator[Cluster]:
    with Cluster(size) as cluster:
        cluster.reforms = False
        yield cluster


def _are_quiet(cluster: Cluster) -> bool:
    return all(rank.driver.rank_status.state is LockstepState.QUIET for rank in cluster.ranks)


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
async def test_an_engine_that_ends_steps_until_its_group_goes_on_without_it(is_busy):
    async with a_leaver() as (cluster, leaver), asyncio.timeout(PATIENCE_S):
        other = cluster.ranks[0]
        if is_busy:
            other.add(1, max_tokens=400)
        ending = leaver.end()
        await _turns()
        assert (leaver.state, ending.done()) == (EngineState.DRAINING, False)
        answers = cluster.form([other], leaving=[leaver.rank])
        await asyncio.gather(*map(asyncio.wrap_future, answers))
        await ending
        assert not leaver.was_awaited
        if is_busy:
            await asyncio.to_thread(other.frontend.read_until_ended, 1)
            assert other.frontend.tokens[1] == expected_tokens(prompt_of(1), 1, 400)
        # No rank was lost: no step was rolled back.
        assert (other.executor.num_drops, other.driver.meeting.size) == (0, 1)


async def test_its_requests_end_before_its_group_is_left():
    async with a_leaver() as (_, leaver), asyncio.timeout(PATIENCE_S):
        leaver.is_dry.clear()
        ending = leaver.end()
        leaver.engine.note_member(False)
        await _turns()
        assert not ending.done()
        leaver.is_dry.set()
        await ending


async def _lose_the_coordinator(cluster: Cluster, leaver: Leaver) -> None:
    leaver.engine.note_member(False)


async def _come_apart(cluster: Cluster, leaver: Leaver) -> None:
    leaver.rank.post(lambda: leaver.rank.driver.leave_group(ValueError("left")))


async def _cut_it_short(cluster: Cluster, leaver: Leaver) -> None:
    leaver.engine.lifecycle.move_to(EngineState.STOPPED)


@pytest.mark.parametrize("cause", [_lose_the_coordinator, _come_apart, _cut_it_short])
@pytest.mark.parametrize("comes_first", [True, False], ids=["before", "meanwhile"])
async def test_ranks_that_cannot_come_are_not_waited_for(cause, comes_first):
    async with a_leaver() as (cluster, leaver), asyncio.timeout(PATIENCE_S):
        if cause is _cut_it_short and comes_first:
            leaver.engine.lifecycle.move_to(EngineState.DRAINING)
        if comes_first:
            await cause(cluster, leaver)
        ending = leaver.end()
        if not comes_first:
            await _turns()
            assert not ending.done()
            await cause(cluster, leaver)
        await ending
        assert leaver.was_awaited is (cause is not _come_apart)


async def test_the_only_rank_of_a_group_ends_at_once():
    async with a_leaver(1) as (_, leaver), asyncio.timeout(PATIENCE_S):
        await leaver.end()


async def test_a_rank_ends_at_once_where_all_have_agreed_to_stand_still():
    async with a_leaver() as (cluster, leaver), asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(asyncio.wrap_future(rank.pause()) for rank in cluster.ranks))
        await asyncio.to_thread(cluster.until, lambda: _are_quiet(cluster))
        await leaver.end()


async def test_a_process_that_is_ending_is_not_stopped_again_and_does_not_stay():
    async with a_leaver() as (_, leaver), asyncio.timeout(PATIENCE_S):
        await leaver.departure.run_dry()
        ending = leaver.end()
        await _turns()
        leaver.departure.stay()
        leaver.departure.leave()
        leaver.departure.drain(None)
        await _turns()
        assert (leaver.state, leaver.num_stops) == (EngineState.DRAINING, 0)
        leaver.engine.note_member(False)
        await ending


async def test_a_process_is_stopped_once_however_many_reasons_there_are():
    async with a_leaver(1) as (_, leaver), asyncio.timeout(PATIENCE_S):
        leaver.departure.drain(None)
        await _turns()
        leaver.departure.leave()
        assert leaver.num_stops == 1
