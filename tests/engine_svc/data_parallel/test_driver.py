"""Ranks in lockstep: waves, votes, pauses, lost ranks and changes of generation, with real loops."""

from __future__ import annotations

import logging
import queue
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

import pytest

from engine_svc.core.request import FinishReason
from engine_svc.data_parallel.driver import LockstepDriver, PreparedGeneration
from engine_svc.data_parallel.group import Meeting
from engine_svc.data_parallel.wave import VOTE_INTERVAL, LockstepState, Vote, WaveMachine
from engine_svc.data_parallel.weights_check import WEIGHTS_MISMATCH
from engine_svc.loop.mailbox import Abort
from engine_svc.loop.pause import PauseMode, RunState
from tests.engine_svc.data_parallel.lockstep_rig import (
    PATIENCE_S,
    Cluster,
    FakeGroup,
    FakeGroups,
    FakeShards,
    Meetings,
    Rank,
)
from tests.engine_svc.fakes import expected_tokens
from tests.engine_svc.loop.test_engine import prompt_of
from triptych_kit.errors import Aborted, FailedPrecondition


def assert_exact(rank: Rank, handles: range, num_tokens: int) -> None:
    for handle in handles:
        assert rank.frontend.tokens[handle] == expected_tokens(prompt_of(handle), handle, num_tokens)
    assert sorted(rank.frontend.ends) == [(handle, FinishReason.LENGTH) for handle in handles]


@pytest.mark.parametrize("depth", [1, 2])
def test_one_busy_rank_gets_its_thousand_tokens_and_the_other_takes_part(depth):
    with Cluster(2, max_in_flight=depth) as cluster:
        busy, idle = cluster.ranks
        busy.add(1, max_tokens=1000)
        busy.frontend.read_until_ended(1)
        cluster.until(lambda: not any(rank.driver.rank_status.is_in_wave for rank in cluster.ranks))
        assert_exact(busy, range(1, 2), 1000)
        assert busy.executor.num_launched == idle.executor.num_launched
        assert idle.executor.num_idle == idle.driver.num_idle_steps == idle.executor.num_launched >= 1000
        for rank in cluster.ranks:
            assert 0 < rank.driver.num_votes <= rank.executor.num_launched // VOTE_INTERVAL


def test_ranks_without_requests_neither_step_nor_vote():
    with Cluster(2) as cluster:
        for rank in cluster.ranks:
            rank.inbox.put(Abort("unknown"))
            rank.ask(lambda: None)
            assert (rank.executor.num_launched, rank.driver.num_votes) == (0, 0)
            assert rank.driver.rank_status.state is LockstepState.PAUSED


def test_requests_on_all_ranks_share_the_waves():
    with Cluster(3) as cluster:
        for index, rank in enumerate(cluster.ranks):
            for handle in range(6):
                rank.add(handle, max_tokens=20 + 10 * index)
        for index, rank in enumerate(cluster.ranks):
            rank.frontend.read_until_ended(6)
            assert_exact(rank, range(6), 20 + 10 * index)


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_request_that_comes_at_the_moment_a_wave_ends_runs(moment):
    with Cluster(2) as cluster:
        first, second = cluster.ranks
        counted: list[int] = []

        def on_count(rank: int, vote: Vote) -> None:
            if rank == 1 and not vote.has_work:
                counted.append(vote.wave)
                if len(counted) <= moment:
                    second.add(len(counted), max_tokens=3)

        cluster.meetings.on_count = on_count
        first.add(1, max_tokens=40)
        first.frontend.read_until_ended(1)
        second.frontend.read_until_ended(moment)
        assert_exact(second, range(1, moment + 1), 3)


def test_a_rank_that_dies_in_a_wave_is_left_and_the_others_go_on_without_it():
    with Cluster(2) as cluster:
        left, dead = cluster.ranks
        dead.executor.hold_at = 40
        left.add(1, max_tokens=200)
        dead.executor.wait_for_launches(40)
        dead.is_alive = False
        dead.groups.group.close()
        left.frontend.read_until_ended(1)
        assert_exact(left, range(1, 2), 200)
        assert left.executor.num_drops == 1
        assert left.driver.rank_status.generation > 1
        dead.executor.gate.set()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_poisonous_request_ends_alone_and_the_other_rank_is_exact(depth):
    with Cluster(2, max_in_flight=depth) as cluster:
        poisoned, other = cluster.ranks

        def on_launch(plan) -> None:
            if "r3" in plan.request_ids:
                raise ValueError("bad row")

        poisoned.executor.on_launch = on_launch
        for handle in range(6):
            poisoned.add(handle, max_tokens=30)
            other.add(handle, max_tokens=60)
        poisoned.frontend.read_until_ended(6)
        other.frontend.read_until_ended(6)
        assert_exact(other, range(6), 60)
        ends = dict(poisoned.frontend.ends)
        assert ends.pop(3) is FinishReason.ERROR
        assert set(ends.values()) == {FinishReason.LENGTH}
        for handle in ends:
            assert poisoned.frontend.tokens[handle] == expected_tokens(prompt_of(handle), handle, 30)


def test_what_waits_for_a_group_ends_at_its_deadline_and_looks_like_no_hang():
    with Cluster(2) as cluster:
        first = cluster.ranks[0]
        cluster.reforms = False
        first.ask(lambda: first.driver.leave_group(ValueError("left")))
        first.add(1, deadline_at=5.0)
        # The statistics of a loop that has come to rest, and not those of the call before.
        stats = first.stats_snapshot.until(lambda stats: not stats.is_in_call and stats.scheduler.num_waiting)
        assert stats.step_started_at is None
        assert first.executor.num_launched == 0
        first.clock.advance(10.0)
        first.ask(lambda: None)
        first.frontend.read_until_ended(1)
        assert first.frontend.ends == [(1, FinishReason.ABORT)]


def test_ranks_are_quiet_when_all_have_paused_and_move_when_all_have_resumed():
    with Cluster(2) as cluster:
        first, second = cluster.ranks
        first.add(1, max_tokens=300)
        first.pause().result(10)
        second.add(2, max_tokens=50)
        second.frontend.read_until_ended(1)
        assert not first.driver.is_quiet
        second.pause().result(10)
        cluster.until(
            lambda: all(rank.driver.rank_status.state is LockstepState.QUIET for rank in cluster.ranks)
        )
        wave = first.driver.rank_status.wave
        assert [rank.ask(lambda rank=rank: rank.driver.start(wave)) for rank in cluster.ranks] == [False] * 2
        first.resume()
        second.add(3, max_tokens=4)
        first.ask(lambda: None)
        assert first.driver.rank_status.state is LockstepState.QUIET
        assert not first.driver.is_quiet
        second.resume()
        first.frontend.read_until_ended(1)
        second.frontend.read_until_ended(2)
        assert first.frontend.tokens == {1: expected_tokens(prompt_of(1), 1, 300)}


def test_a_dummy_batch_of_an_idle_rank_is_a_step_of_all_ranks():
    with Cluster(2) as cluster:
        first, second = cluster.ranks
        first.call(first.controls.execute_dummy_batch)
        assert first.driver.num_idle_steps > 0
        cluster.until(lambda: all(rank.driver.rank_status.wave == 2 for rank in cluster.ranks))
        assert second.driver.num_idle_steps == first.driver.num_idle_steps == VOTE_INTERVAL
        second.add(1)
        second.frontend.read_until_ended(1)
        assert_exact(second, range(1, 2), 5)


def test_ranks_that_have_agreed_to_pause_run_no_dummy_batch():
    with Cluster(2) as cluster:
        for answer in [rank.pause() for rank in cluster.ranks]:
            answer.result(PATIENCE_S)
        cluster.until(lambda: all(rank.driver.is_quiet for rank in cluster.ranks))
        with pytest.raises(FailedPrecondition, match="are paused"):
            cluster.ranks[0].call(cluster.ranks[0].controls.execute_dummy_batch)
        assert all(rank.error is None for rank in cluster.ranks)


def test_only_quiet_ranks_give_memory_or_weights_up():
    with Cluster(2) as cluster:
        first, second = cluster.ranks
        sleep = [first.sleep(1)]
        first.pause().result(10)
        sleep.append(first.sleep(1))
        with pytest.raises(FailedPrecondition, match="pause all of them"):
            first.update_weights()
        for answer in sleep:
            with pytest.raises(FailedPrecondition, match="pause all of them"):
                answer.result(10)
        assert first.controls.pause_controller.state is RunState.PAUSED
        second.pause().result(10)
        cluster.until(
            lambda: all(rank.driver.rank_status.state is LockstepState.QUIET for rank in cluster.ranks)
        )
        first.sleep(1).result(10)
        assert first.controls.pause_controller.state is RunState.ASLEEP
        first.post(first.controls.pause_controller.wake)
        for rank in cluster.ranks:
            rank.resume()
        second.add(1)
        second.frontend.read_until_ended(1)


def test_a_pause_waits_for_no_step_of_another_rank():
    with Cluster(2) as cluster:
        busy, idle = cluster.ranks
        busy.add(1, max_tokens=1000)
        idle.add(2, max_tokens=3)
        idle.pause(PauseMode.WAIT).result(10)
        assert len(busy.frontend.ends) == 0
        idle.resume()
        busy.frontend.read_until_ended(1)


def test_no_order_of_pauses_resumes_and_requests_ends_in_a_deadlock():
    with Cluster(2) as cluster:
        num_added, quiet = [0, 0], list[int]()
        cluster.ranks[0].driver.subscribe(
            lambda rank_status: (
                quiet.append(rank_status.wave) if rank_status.state is LockstepState.QUIET else None
            )
        )
        for seed in range(200):
            chance = random.Random(seed)
            for _ in range(chance.randrange(2, 8)):
                index = chance.randrange(2)
                rank = cluster.ranks[index]
                match chance.randrange(5):
                    case 0:
                        rank.pause(chance.choice((PauseMode.KEEP, PauseMode.WAIT)))
                    case 1:
                        rank.resume()
                    case 2:
                        for other in chance.sample(cluster.ranks, 2):
                            other.pause(PauseMode.KEEP)
                        cluster.until(
                            lambda: all(
                                rank.driver.rank_status.state is LockstepState.QUIET for rank in cluster.ranks
                            )
                        )
                    case _:
                        num_added[index] += 1
                        rank.add(num_added[index], max_tokens=chance.randrange(1, 40))
            for rank in chance.sample(cluster.ranks, 2):
                rank.resume()
            for rank, num_requests in zip(cluster.ranks, num_added, strict=True):
                rank.frontend.read_until_ended(num_requests)
        for rank, num_requests in zip(cluster.ranks, num_added, strict=True):
            assert {reason for _, reason in rank.frontend.ends} == {FinishReason.LENGTH}
            assert len(rank.frontend.ends) == num_requests
        # Often enough all of them stood still at the same time.
        assert len(quiet) > 10


def test_ranks_change_over_together_and_keep_what_runs():
    with Cluster(3) as cluster:
        cluster.reforms = False
        first, second, third = cluster.ranks
        first.add(1, max_tokens=1000)
        second.add(2, max_tokens=1000)
        first.executor.wait_for_launches(50)
        for answer in cluster.form([second, first], leaving=[third]):
            answer.result(10)
        assert third.driver.meeting is None
        third.is_alive = False
        assert (first.groups.group.meeting.rank, second.groups.group.meeting.rank) == (1, 0)
        for rank in (first, second):
            rank.frontend.read_until_ended(1)
            assert rank.executor.num_drops <= 1
            assert rank.shards.asked[-2:] == [(rank.groups.group.meeting.rank, 2), "adopt"]
        assert first.frontend.tokens[1] == expected_tokens(prompt_of(1), 1, 1000)
        assert second.frontend.tokens[2] == expected_tokens(prompt_of(2), 2, 1000)
        assert third.driver.rank_status.generation == 0


def test_a_wave_number_never_goes_back_over_generations():
    with Cluster(2) as cluster:
        first, second = cluster.ranks
        waves: list[int] = []
        first.driver.subscribe(lambda rank_status: waves.append(rank_status.wave))
        for handle in range(4):
            first.add(handle, max_tokens=3)
            first.frontend.read_until_ended(handle + 1)
            second.ask(lambda: second.driver.leave_group(ValueError("left")))
        assert waves == sorted(waves)
        assert waves[-1] > 3


def prepare_alone(rank: Rank, generation: int) -> PreparedGeneration:
    """What lets this rank go on as the only one."""
    meeting = Meeting(generation, 0, 1, "10.0.0.1", 7000)
    rank.driver.prepare(meeting)
    return PreparedGeneration(generation, meeting)


def test_a_rank_whose_peer_has_ended_meanwhile_changes_over_without_a_wave():
    with Cluster(2) as cluster:
        cluster.reforms = False
        left, dead = cluster.ranks
        dead.is_alive = False
        answer: Future[None] = Future()
        prepared = prepare_alone(left, 2)
        left.post(lambda: left.driver.commit(prepared, answer, lost_generation=1))
        answer.result(PATIENCE_S)
        assert (left.driver.rank_status.generation, left.driver.meeting) == (2, prepared.meeting)
        assert (left.executor.num_launched, left.driver.num_votes) == (0, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_rank_waiting_for_an_ended_rank_is_released_from_outside(depth):
    with Cluster(2, max_in_flight=depth) as cluster:
        cluster.reforms = False
        left, dead = cluster.ranks
        dead.executor.hold_at = 40
        left.add(1, max_tokens=200)
        dead.executor.wait_for_launches(40)
        dead.is_alive = False
        answer: Future[None] = Future()
        prepared = prepare_alone(left, 2)
        left.post(lambda: left.driver.commit(prepared, answer, lost_generation=1))
        left.driver.break_off(1)
        answer.result(PATIENCE_S / 2)
        left.frontend.read_until_ended(1)
        assert_exact(left, range(1, 2), 200)
        dead.executor.gate.set()


def test_who_has_ended_before_a_generation_was_formed_is_no_loss_to_it():
    with Cluster(2) as cluster:
        cluster.reforms = False
        wait(cluster.form(cluster.ranks), PATIENCE_S)
        stays, leaves = cluster.ranks
        stays.driver.break_off(1)
        answers = cluster.form([stays], leaving=[leaves], lost_generation=1)
        for answer in answers:
            answer.result(PATIENCE_S)
        assert leaves.driver.meeting is None
        assert (stays.executor.num_drops, stays.driver.num_votes) == (0, 2)


def test_ranks_that_have_agreed_to_pause_do_so_even_if_a_rank_has_ended():
    with Cluster(2) as cluster:
        cluster.reforms = False
        first, _ = cluster.ranks
        for rank in cluster.ranks:
            rank.pause().result(PATIENCE_S)
        cluster.until(lambda: all(rank.driver.is_quiet for rank in cluster.ranks))
        prepared = prepare_alone(first, 2)
        answer: Future[None] = Future()
        first.driver.break_off(1)
        first.ask(lambda: first.driver.commit(prepared, answer, lost_generation=1))
        assert (first.driver.is_quiet, answer.done()) == (True, False)


# Ranks in lockstep whose weights change, or differ, or are asleep: they never step with mixed ones.

OLD, NEW = "ab" * 32, "12" * 32


def replace_weights(rank: Rank, digest: str) -> None:
    rank.update_weights()
    rank.ask(lambda: rank.driver.note_weights(digest))


def pause_ranks(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        rank.pause().result(PATIENCE_S)
    cluster.until(lambda: all(rank.driver.is_quiet for rank in cluster.ranks))


def test_ranks_with_other_weights_do_not_meet_and_do_once_they_have_the_same(caplog):
    with Cluster(2) as cluster:
        cluster.reforms = False
        first, second = cluster.ranks
        second.ask(lambda: second.driver.leave_group(ValueError("left")))
        cluster.until(lambda: not second.driver.rank_status.generation)
        first.ask(lambda: first.driver.leave_group(ValueError("left")))
        replace_weights(second, NEW)
        with caplog.at_level(logging.ERROR):
            for _ in range(2):
                serving, odd = cluster.form(cluster.ranks)
                with pytest.raises(FailedPrecondition, match=r"has weights 12.* 0 has 00") as refused:
                    odd.result(PATIENCE_S)
                assert refused.value.reason == WEIGHTS_MISMATCH
                with pytest.raises(Aborted, match=r"has weights 00.* 1 has 12"):
                    serving.result(PATIENCE_S)
        errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
        assert errors == ["ranks with different weights do not meet"]
        assert [rank.driver.rank_status.state for rank in cluster.ranks] == [LockstepState.APART] * 2
        replace_weights(first, NEW)
        for answer in cluster.form(cluster.ranks):
            answer.result(PATIENCE_S)
        first.add(1)
        first.frontend.read_until_ended(1)
        assert first.frontend.tokens == {1: expected_tokens(prompt_of(1), 1, 5)}


def test_ranks_that_resume_with_other_weights_come_apart_and_step_no_more():
    with Cluster(2) as cluster:
        cluster.reforms = False
        pause_ranks(cluster)
        replace_weights(cluster.ranks[0], NEW)
        num_launched = [rank.executor.num_launched for rank in cluster.ranks]
        for rank in cluster.ranks:
            rank.add(1)
            rank.resume()
        cluster.until(lambda: all(not rank.driver.rank_status.generation for rank in cluster.ranks))
        assert [rank.executor.num_launched for rank in cluster.ranks] == num_launched


def test_all_ranks_resume_with_the_same_new_weights():
    with Cluster(2) as cluster:
        pause_ranks(cluster)
        for rank in cluster.ranks:
            replace_weights(rank, NEW)
            rank.resume()
        cluster.ranks[0].add(1)
        cluster.ranks[0].frontend.read_until_ended(1)
        assert [rank.driver.rank_status.generation for rank in cluster.ranks] == [1, 1]


def test_a_rank_in_no_group_says_so_and_gives_nothing_up():
    with Cluster(1) as cluster:
        cluster.reforms = False
        (rank,) = cluster.ranks
        rank.pause().result(PATIENCE_S)
        rank.ask(lambda: rank.driver.leave_group(ValueError("left")))
        with pytest.raises(FailedPrecondition, match="in no group at present") as refused:
            rank.sleep(1).result(PATIENCE_S)
        assert refused.value.reason == "RANKS_APART"


class Bare:
    """A driver without a loop, which votes after each step, in a group of its own."""

    def __init__(self) -> None:
        self.meetings = Meetings()
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.driver = LockstepDriver(
            machine=WaveMachine(interval=1),
            groups=LosingGroups(self.meetings),
            shards=FakeShards(),
            post=self.posted.put,
        )

    def form(self, generation: int) -> None:
        meeting = Meeting(generation, 0, 1, "10.0.0.1", 7000)
        answer: Future[None] = Future()
        self.driver.commit(PreparedGeneration(generation, meeting), answer)
        while not answer.done():
            self.do_posted()

    def do_posted(self) -> None:
        self.posted.get(timeout=PATIENCE_S)()


class LosingGroup(FakeGroup):
    """Whose other ranks do not resume."""

    def when_all_resumed(self, weights: int, done: Callable[[], None], lost: Callable[[], None]) -> None:
        lost()


class LosingGroups(FakeGroups):
    def form(self, meeting: Meeting) -> FakeGroup:
        return LosingGroup(self._meetings, meeting)


@pytest.fixture
def bare() -> Iterator[Bare]:
    made = Bare()
    made.form(1)
    yield made
    made.driver.close()


def test_what_a_rank_asks_for_can_be_seen_before_it_waits_for_the_others(bare):
    driver, seen = bare.driver, []
    bare.meetings.on_count = lambda rank, vote: seen.append(
        (driver.rank_status.asks, driver.rank_status.wave)
    )
    assert driver.may_step(True)
    driver.on_step_launched(is_idle=False, has_work=True)
    assert seen == [(True, 1)]


def test_a_group_is_lost_only_when_all_that_was_launched_in_it_has_come_back(bare):
    driver = bare.driver
    driver.pause()
    for has_work in (True, True, False):
        assert driver.may_step(has_work)
        driver.on_step_launched(is_idle=not has_work, has_work=has_work)
    assert driver.is_quiet
    driver.resume()
    bare.do_posted()
    for _ in range(3):
        assert driver.rank_status.generation == 1
        driver.on_step_done()
    assert driver.rank_status.generation == 0
    bare.form(2)
    assert driver.may_step(True)
    driver.on_step_launched(is_idle=False, has_work=True)
    driver.on_step_done()
    assert (driver.rank_status.generation, driver.rank_status.asks) == (2, False)
