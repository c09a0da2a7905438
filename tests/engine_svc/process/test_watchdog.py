"""A step that hangs ends the process; one that was announced, or a process that was stopped, does not."""

from __future__ import annotations

import io
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine_svc.core.step import StepPlan
from engine_svc.loop.mailbox import LoopStats, StatsSnapshot
from engine_svc.loop.step_time import StepTimeEstimator
from engine_svc.process.watchdog import EXIT_HUNG, Watchdog
from tests.engine_svc.session.unread import exit_code_unread
from triptych_kit.clock import FakeClock, MonotonicClock

TICK_S = 0.25
LIMIT_S = 5.0


class Watch:
    """A watchdog that looks when the test says so."""

    def __init__(self) -> None:
        self._clock = FakeClock()
        self._watchdog = Watchdog(StatsSnapshot(), self._clock, lambda reason: None, tick_s=TICK_S)

    def look(self, stats: LoopStats, now: float) -> float | None:
        self._clock.advance(now - self._clock.now())
        return self._watchdog.hung_for_s(stats)


def running(step_number: int = 3, started_at: float = 0.0, **options: Any) -> LoopStats:
    """A step that runs, of the usual budget."""
    return LoopStats(
        **{
            "step_number": step_number,
            "step_started_at": started_at,
            "step_budget_s": LIMIT_S,
            "has_work": True,
            **options,
        }
    )


def seconds_until_seen(watch: Watch, stats: LoopStats, *, start_s: float, most_s: float) -> float | None:
    """How long the watch reads the same statistics before it reports that the step hangs."""
    for number in range(int(most_s / TICK_S)):
        if watch.look(stats, start_s + number * TICK_S) is not None:
            return number * TICK_S
    return None


def test_a_hung_step_is_seen_within_half_a_second_of_the_limit():
    stats = running(started_at=100.0)
    seen = seconds_until_seen(Watch(), stats, start_s=100.0, most_s=20)
    assert seen is not None
    assert LIMIT_S < seen <= LIMIT_S + 0.5


def test_a_step_that_goes_on_in_pace_with_others_does_not_hang_before_they_stand_still():
    stats_snapshot, watch = StatsSnapshot(), Watch()
    stats_snapshot.post(running())
    for number in range(240):
        now = number * TICK_S
        if number % 16 == 0:
            stats_snapshot.note_progress(now)
        assert watch.look(stats_snapshot.read(), now) is None
    seen = seconds_until_seen(watch, stats_snapshot.read(), start_s=60.0, most_s=20)
    assert seen is not None
    assert LIMIT_S - 4.0 < seen <= LIMIT_S + 0.5


def test_progress_of_an_earlier_step_makes_none_of_a_later_one_younger():
    stats_snapshot = StatsSnapshot()
    stats_snapshot.note_progress(7.0)
    stats_snapshot.post(LoopStats(step_number=4, step_started_at=8.0))
    assert stats_snapshot.read().step_started_at == 8.0
    stats_snapshot.post(LoopStats(step_number=4))
    assert stats_snapshot.read().step_started_at is None


def test_a_step_has_the_time_that_was_announced():
    stats = running(step_budget_s=30.0)
    seen = seconds_until_seen(Watch(), stats, start_s=0.0, most_s=60)
    assert seen is not None
    assert 30.0 < seen <= 30.5


def test_an_idle_engine_never_hangs():
    watch = Watch()
    assert seconds_until_seen(watch, LoopStats(step_number=3), start_s=0.0, most_s=600) is None


def test_steps_that_follow_each_other_are_not_added_up():
    watch = Watch()
    for number in range(4000):
        now = number * TICK_S
        started_at = now - now % 4.0
        assert watch.look(running(int(now // 4), started_at), now) is None


@pytest.mark.parametrize("stopped_s", [5.0, 60.0, 100_000.0])
def test_time_in_which_the_process_was_stopped_is_no_steps_fault(stopped_s):
    watch = Watch()
    stats = running(1)
    now = 0.0
    for _ in range(12):
        now += TICK_S
        assert watch.look(stats, now) is None
    now += stopped_s
    # Three seconds of the step before it, and one after it.
    for _ in range(4):
        assert watch.look(stats, now) is None
        now += TICK_S
    assert watch.look(running(2, now), now) is None


def plan_of(num_tokens: list[int], num_computed_tokens: list[int]) -> StepPlan:
    return StepPlan(
        1,
        request_ids=[f"r{row}" for row in range(len(num_tokens))],
        num_tokens=num_tokens,
        num_computed_tokens=num_computed_tokens,
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_thousand_long_steps_whose_cost_grows_with_their_tokens_raise_no_alarm(seed):
    rng = random.Random(seed)
    estimator, watch, now, num_long = StepTimeEstimator(LIMIT_S), Watch(), 0.0, 0
    s_per_token, s_per_read = rng.uniform(0.002, 0.01), rng.uniform(1e-7, 1e-6)
    number = 0
    while num_long < 1000:
        number += 1
        if number == 1:
            plan = plan_of([64], [0])
        elif rng.random() < 0.5:
            plan = plan_of([rng.randint(1, 4096)], [rng.randint(0, 30_000)])
        else:
            rows = rng.randint(1, 256)
            plan = plan_of([1] * rows, [rng.randint(1, 30_000) for _ in range(rows)])
        reads = sum(
            count * (computed + count)
            for count, computed in zip(plan.num_tokens, plan.num_computed_tokens, strict=True)
        )
        seconds = (0.02 + s_per_token * plan.total_num_tokens + s_per_read * reads) * rng.uniform(0.8, 1.25)
        num_long += seconds > LIMIT_S
        estimator.begin(plan, now)
        stats = LoopStats(
            step_number=number, step_started_at=estimator.running_since, step_budget_s=estimator.budget_s
        )
        for tick in range(int(seconds / TICK_S)):
            assert watch.look(stats, now + tick * TICK_S) is None, (seconds, stats)
        now += seconds
        estimator.end(now)


def test_usual_steps_have_the_least_budget_however_short_they_are():
    estimator, now = StepTimeEstimator(LIMIT_S), 0.0
    for number in range(500):
        estimator.begin(plan_of([1] * 32, [100 + number] * 32), now)
        now += 0.04
        estimator.end(now)
    estimator.begin(plan_of([1] * 32, [600] * 32), now)
    assert estimator.budget_s == LIMIT_S
    assert estimator.running_since == now


def test_the_first_step_has_time_to_compile():
    estimator = StepTimeEstimator(LIMIT_S)
    estimator.begin(plan_of([1], [0]), 0.0)
    assert estimator.budget_s >= 60.0


def test_slow_steps_are_announced_as_ten_times_the_slowest_in_a_hundred():
    estimator, now = StepTimeEstimator(LIMIT_S), 0.0
    for _ in range(128):
        estimator.begin(plan_of([64], [0]), now)
        now += 2.0
        estimator.end(now)
    estimator.begin(plan_of([64], [0]), now)
    assert estimator.budget_s == pytest.approx(20.0)


def test_the_oldest_of_two_steps_runs_since_the_one_before_it_was_over():
    estimator = StepTimeEstimator(LIMIT_S)
    estimator.begin(plan_of([4], [0]), 1.0)
    estimator.begin(plan_of([1], [4]), 1.5)
    assert estimator.running_since == 1.0
    estimator.end(3.0)
    assert estimator.running_since == 3.0
    estimator.end(4.0)
    assert estimator.running_since is None


def test_what_is_done_between_two_steps_is_not_their_time_and_has_a_budget_of_its_own():
    estimator = StepTimeEstimator(LIMIT_S)
    estimator.begin(plan_of([4], [0]), 1.0)
    of_step = estimator.budget_s
    estimator.begin_call(2.0)
    assert (estimator.is_in_call, estimator.running_since, estimator.budget_s) == (True, 2.0, 600.0)
    estimator.end_call(50.0)
    assert (estimator.is_in_call, estimator.running_since, estimator.budget_s) == (False, 50.0, of_step)
    estimator.drop()
    assert (estimator.running_since, estimator.budget_s) == (None, LIMIT_S)


def test_no_call_has_less_time_than_a_usual_step():
    estimator = StepTimeEstimator(1000.0)
    estimator.begin_call(2.0)
    assert estimator.budget_s == 1000.0


def test_a_call_on_an_engine_without_steps_leaves_nothing_running():
    estimator = StepTimeEstimator(LIMIT_S)
    estimator.begin_call(2.0)
    estimator.end_call(50.0)
    assert (estimator.running_since, estimator.budget_s) == (None, LIMIT_S)


def test_a_call_that_hangs_is_seen_when_its_budget_is_over():
    estimator = StepTimeEstimator(LIMIT_S)
    estimator.begin_call(0.0)
    stats = LoopStats(
        step_number=3, step_started_at=estimator.running_since, step_budget_s=estimator.budget_s
    )
    seen = seconds_until_seen(Watch(), stats, start_s=0.0, most_s=700)
    assert seen is not None
    assert 600.0 < seen <= 600.5


class Notes:
    """What a watchdog did, in order; `ended` when it ended the process."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.ended = threading.Event()
        self.when_dumped: Callable[[], object] = lambda: None
        self.on_reported: Callable[[], None] = lambda: None

    def dump(self) -> None:
        self.words.append("dump")
        self.when_dumped()

    def on_hang(self, reason: str) -> None:
        self.words.append(reason)
        self.on_reported()

    def end(self, exit_code: int) -> None:
        self.words.append(f"exit {exit_code}")
        self.ended.set()


def make_watchdog(notes: Notes, stats_snapshot: StatsSnapshot, *, grace_s: float) -> Watchdog:
    return Watchdog(
        stats_snapshot,
        MonotonicClock(),
        notes.on_hang,
        tick_s=0.01,
        grace_s=grace_s,
        dump_stacks=notes.dump,
        end_process=notes.end,
    )


def test_a_hang_is_dumped_and_reported_and_the_process_is_ended():
    notes, stats_snapshot = Notes(), StatsSnapshot()
    stats_snapshot.post(running(7, step_budget_s=0.05))
    watchdog = make_watchdog(notes, stats_snapshot, grace_s=0.0)
    watchdog.start()
    assert notes.ended.wait(10)
    assert watchdog.join(10)
    dumped, reported, ended = notes.words
    assert (dumped, ended) == ("dump", f"exit {EXIT_HUNG}")
    assert reported.startswith("step 7 has been running for ")


def test_a_process_whose_stack_dump_blocks_is_reported_and_ended():
    notes, stats_snapshot, is_read = Notes(), StatsSnapshot(), threading.Event()
    stats_snapshot.post(running(7, step_budget_s=0.05))
    notes.when_dumped = is_read.wait
    watchdog = make_watchdog(notes, stats_snapshot, grace_s=0.0)
    watchdog.start()
    assert notes.ended.wait(10)
    is_read.set()
    assert watchdog.join(10)
    dumped, reported, ended = notes.words
    assert (dumped, ended) == ("dump", f"exit {EXIT_HUNG}")
    assert reported.startswith("step 7 has been running for ")


HUNG = """
import threading
from engine_svc.loop.mailbox import StatsSnapshot, LoopStats
from engine_svc.process.watchdog import Watchdog
from triptych_kit.clock import MonotonicClock
stats = StatsSnapshot()
stats.post(LoopStats(step_number=7, step_started_at=0.0, step_budget_s=0.05))
Watchdog(stats, MonotonicClock(), lambda reason: None, tick_s=0.01, grace_s=0.0).start()
threading.Event().wait()
"""


def test_the_stack_dump_does_not_block_other_threads():
    assert exit_code_unread(HUNG) == EXIT_HUNG


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_process_whose_hang_callback_fails_is_ended():
    notes, stats_snapshot = Notes(), StatsSnapshot()
    stats_snapshot.post(running(7, step_budget_s=0.05))

    def fail() -> None:
        raise RuntimeError("the event loop is closed")

    notes.on_reported = fail
    watchdog = make_watchdog(notes, stats_snapshot, grace_s=0.0)
    watchdog.start()
    assert notes.ended.wait(10)
    assert watchdog.join(10)


@pytest.mark.parametrize("stderr", [None, io.StringIO()], ids=["without", "with"])
def test_a_process_with_or_without_stderr_is_reported_and_ended(stderr, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "__stderr__", stderr)
    notes, stats_snapshot = Notes(), StatsSnapshot()
    stats_snapshot.post(running(7, step_budget_s=0.05))
    watchdog = Watchdog(
        stats_snapshot,
        MonotonicClock(),
        notes.on_hang,
        tick_s=0.01,
        grace_s=0.0,
        end_process=notes.end,
    )
    watchdog.start()
    assert notes.ended.wait(10)
    assert watchdog.join(10)
    assert len(notes.words) == 2
    assert stderr is None or "test_watchdog.py" in stderr.getvalue()


def test_a_hanging_call_is_not_reported_as_a_step():
    notes, stats_snapshot = Notes(), StatsSnapshot()
    stats_snapshot.post(running(7, step_budget_s=0.05, is_in_call=True))
    watchdog = make_watchdog(notes, stats_snapshot, grace_s=0.0)
    watchdog.start()
    assert notes.ended.wait(10)
    assert watchdog.join(10)
    assert notes.words[1].startswith("a call after step 7 has been running for ")


def test_a_process_that_ends_in_order_is_left_to_it():
    notes, stats_snapshot = Notes(), StatsSnapshot()
    stats_snapshot.post(running(7, step_budget_s=0.05))
    notes.on_reported = lambda: watchdog.stop()
    watchdog = make_watchdog(notes, stats_snapshot, grace_s=60.0)
    watchdog.start()
    assert watchdog.join(10)
    assert not notes.ended.is_set()


def test_a_watchdog_that_was_stopped_looks_no_more():
    notes = Notes()
    watchdog = make_watchdog(notes, StatsSnapshot(), grace_s=0.0)
    watchdog.start()
    watchdog.stop()
    assert watchdog.join(10)
    assert notes.words == []


def test_the_clock_may_jump_once_without_an_alarm():
    watch, stats = Watch(), running(1)
    watch.look(stats, 0.0)
    assert watch.look(stats, 86_400.0) is None
