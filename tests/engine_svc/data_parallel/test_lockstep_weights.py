"""Ranks in lockstep whose weights change, or differ, or are asleep: they never step with mixed ones."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from engine_svc.data_parallel.driver import LockstepDriver, Prepared
from engine_svc.data_parallel.group import Meeting
from engine_svc.data_parallel.wave import LockstepState, WaveMachine
from engine_svc.data_parallel.weights_check import WEIGHTS_MISMATCH
from service_kit.errors import Aborted, FailedPrecondition
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

OLD, NEW = "ab" * 32, "12" * 32


def put_in_place(rank: Rank, digest: str) -> None:
    """Other weights, as by an operator."""
    rank.update_weights()
    rank.ask(lambda: rank.driver.note_weights(digest))


def stand_still(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        rank.pause().result(PATIENCE_S)
    cluster.until(lambda: all(rank.driver.is_quiet for rank in cluster.ranks))


def test_ranks_with_other_weights_do_not_meet_and_do_once_they_have_the_same(caplog):
    with Cluster(2) as cluster:
        cluster.reforms = False
        first, second = cluster.ranks
        second.ask(lambda: second.driver.lose(ValueError("left")))
        cluster.until(lambda: not second.driver.standing.generation)
        first.ask(lambda: first.driver.lose(ValueError("left")))
        put_in_place(second, NEW)
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
        assert [rank.driver.standing.state for rank in cluster.ranks] == [LockstepState.APART] * 2
        put_in_place(first, NEW)
        for answer in cluster.form(cluster.ranks):
            answer.result(PATIENCE_S)
        first.add(1)
        first.frontend.read_until_ended(1)
        assert first.frontend.tokens == {1: expected_tokens(prompt_of(1), 1, 5)}


def test_ranks_that_resume_with_other_weights_come_apart_and_step_no_more():
    with Cluster(2) as cluster:
        cluster.reforms = False
        stand_still(cluster)
        put_in_place(cluster.ranks[0], NEW)
        num_launched = [rank.executor.num_launched for rank in cluster.ranks]
        for rank in cluster.ranks:
            rank.add(1)
            rank.resume()
        cluster.until(lambda: all(not rank.driver.standing.generation for rank in cluster.ranks))
        assert [rank.executor.num_launched for rank in cluster.ranks] == num_launched


def test_all_ranks_resume_with_the_same_new_weights():
    with Cluster(2) as cluster:
        stand_still(cluster)
        for rank in cluster.ranks:
            put_in_place(rank, NEW)
            rank.resume()
        cluster.ranks[0].add(1)
        cluster.ranks[0].frontend.read_until_ended(1)
        assert [rank.driver.standing.generation for rank in cluster.ranks] == [1, 1]


def test_a_rank_in_no_group_says_so_and_gives_nothing_up():
    with Cluster(1) as cluster:
        cluster.reforms = False
        (rank,) = cluster.ranks
        rank.pause().result(PATIENCE_S)
        rank.ask(lambda: rank.driver.lose(ValueError("left")))
        with pytest.raises(FailedPrecondition, match="in no group at present") as refused:
            rank.sleep(1).result(PATIENCE_S)
        assert refused.value.reason == "RANKS_APART"


class Bare:
    """A driver without a loop, which votes after each step, in a group with nobody else."""

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
        self.driver.commit(Prepared(generation, meeting), answer)
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
    bare.meetings.on_count = lambda rank, vote: seen.append((driver.standing.asks, driver.standing.wave))
    assert driver.may_step(True)
    driver.launched(is_idle=False, has_work=True)
    assert seen == [(True, 1)]


def test_a_group_is_lost_only_when_all_that_was_launched_in_it_has_come_back(bare):
    driver = bare.driver
    driver.pause()
    for has_work in (True, True, False):
        assert driver.may_step(has_work)
        driver.launched(is_idle=not has_work, has_work=has_work)
    assert driver.is_quiet
    driver.resume()
    bare.do_posted()
    for _ in range(3):
        assert driver.standing.generation == 1
        driver.came_back()
    assert driver.standing.generation == 0
    bare.form(2)
    assert driver.may_step(True)
    driver.launched(is_idle=False, has_work=True)
    driver.came_back()
    assert (driver.standing.generation, driver.standing.asks) == (2, False)
