"""What watchers see: requests in order, their blocks, what they wait for, and steps."""

from __future__ import annotations

from typing import Any

from engine_svc.cache.attention import AlignedState, FullAttention, SlidingWindow
from engine_svc.scheduler.config import PauseState
from engine_svc.scheduler.watch import MAX_STEPS, SchedulerWatch, WatchedState, WatchedStep
from tests.engine_svc.scheduler.doubles import Compiler
from tests.engine_svc.scheduler.fakes import Stage, request
from triptych_kit.clock import FakeClock


class Watched(Stage):
    """A stage whose scheduler is watched; `now` is also the time of the watch."""

    def __init__(self, *, features: tuple = (), **options: Any) -> None:
        self.clock = FakeClock()
        self.watch = SchedulerWatch(self.clock)
        super().__init__(features=(*features, self.watch), **options)
        assert self.watch.wrap(self.scheduler, self.cache) is self.scheduler
        self.read()

    def schedule(self):
        self.clock.advance(1.0)
        return super().schedule()

    def read(self, *, max_requests: int = 100, max_blocks: int = 100, after_step: int = 0) -> WatchedState:
        return self.watch.read(max_requests=max_requests, max_blocks=max_blocks, after_step=after_step)

    def blockers(self) -> dict[str, tuple[str, ...]]:
        return {one.request_id: tuple(one.blockers) for one in self.read().requests}


def test_requests_are_listed_running_first_and_blocks_are_shared_by_equal_prefixes():
    stage = Watched(max_num_seqs=2)
    first, second = request("a", 40, salt="s"), request("b", 40, salt="s", arrival_at=1.0)
    stage.add(first, second, request("c", 8, priority=3))
    stage.step()
    stage.clock.advance(2.0)
    state = stage.read()
    assert [(one.request_id, one.status.name) for one in state.requests] == [
        ("a", "RUNNING"), ("b", "RUNNING"), ("c", "WAITING"),
    ]  # fmt: skip
    a, b, c = state.requests
    assert a.block_ids == first.block_tables[0].block_ids and a.num_blocks == 3
    # Two full blocks of 16 tokens are common.
    assert b.block_ids[:2] == a.block_ids[:2] and b.block_ids[2] != a.block_ids[2]
    assert (c.num_blocks, list(c.block_ids), c.priority) == (0, [], 3)
    assert (a.num_prompt_tokens, a.num_output_tokens, a.num_computed_tokens) == (40, 1, 40)
    assert (state.at, a.arrival_at, b.arrival_at) == (3.0, 0.0, 1.0)
    assert list(state.cached_block_ids) == []


def test_blocks_that_outlive_their_request_are_cached_the_last_to_be_reused_first():
    stage = Watched()
    gone = request("a", 40, max_tokens=1)
    stage.add(gone)
    plan = stage.schedule()
    [first, second, _] = gone.block_tables[0].block_ids
    stage.update(plan)
    state = stage.read()
    assert state.requests == []
    # The third was never full.
    assert list(state.cached_block_ids) == [first, second]
    assert list(stage.read(max_blocks=1).cached_block_ids) == [first]


def test_only_the_states_that_are_there_are_listed():
    stage = Watched(groups=(FullAttention(16), AlignedState(16)))
    stage.add(watched := request("a", 90))
    stage.schedule()
    attention, states = (table.block_ids for table in watched.block_tables)
    assert states[:4] == [0, 0, 0, 0]
    [one] = stage.read().requests
    assert (one.num_blocks, one.block_ids) == (6, [*attention, states[4]])


def test_limits_cut_requests_and_blocks_but_not_counts():
    stage = Watched()
    stage.add(*(request(name, 40) for name in "abc"))
    stage.step()
    state = stage.read(max_requests=2, max_blocks=4)
    assert [one.request_id for one in state.requests] == ["a", "b"]
    assert [(one.num_blocks, len(one.block_ids)) for one in state.requests] == [(3, 3), (3, 1)]
    assert stage.read(max_requests=0, max_blocks=0)[1:] == ([], [], stage.read().steps)


def test_released_blocks_of_a_window_are_not_shown():
    stage = Watched(groups=[FullAttention(16), SlidingWindow(16, 32)])
    long = request("a", 100)
    stage.add(long)
    for _ in range(3):
        stage.step()
    [shown] = stage.read().requests
    whole, window = long.block_tables
    assert window.num_released > 0
    assert shown.block_ids == [*whole.block_ids, *window.block_ids[window.num_released :]]
    assert 0 not in shown.block_ids and shown.num_blocks == len(shown.block_ids)


def test_a_request_behind_the_limit_of_running_ones_waits_for_it():
    stage = Watched(max_num_seqs=1)
    stage.add(request("a", 8), request("b", 8))
    stage.step()
    assert stage.blockers() == {"a": (), "b": ("max_num_seqs",)}


def test_a_request_that_no_token_of_the_step_was_left_for_waits_for_the_budget():
    stage = Watched(max_num_batched_tokens=16)
    stage.add(request("a", 40), request("b", 8))
    stage.step()
    assert stage.blockers() == {"a": (), "b": ("max_num_batched_tokens",)}


def test_a_request_that_does_not_fit_waits_for_blocks_and_so_does_a_preempted_one():
    stage = Watched(num_blocks=5)
    stage.add(request("a", 40), request("b", 40))
    stage.step()
    assert stage.blockers() == {"a": (), "b": ("free_blocks",)}
    stage = Watched(num_blocks=5)
    stage.add(request("a", 32), request("b", 32))
    for _ in range(2):
        stage.step()
    assert stage.blockers() == {"a": (), "b": ("free_blocks",)}


def test_a_pause_holds_waiting_requests_and_a_full_one_running_ones_too():
    stage = Watched(max_num_seqs=1)
    stage.add(request("a", 8), request("b", 8))
    stage.step()
    stage.scheduler.set_pause(PauseState.NEW)
    assert stage.blockers() == {"a": (), "b": ("paused",)}
    stage.scheduler.set_pause(PauseState.ALL)
    assert stage.blockers() == {"a": ("paused",), "b": ("paused",)}


def test_a_blocked_request_names_its_blockers_and_a_new_one_none():
    stage = Watched(max_num_seqs=1, features=(Compiler("b"),))
    stage.add(request("a", 8), request("b", 8), request("c", 8))
    stage.step()
    # Later than the newest plan, which says nothing of it.
    stage.add(request("d", 8, arrival_at=stage.clock.now() + 0.5))
    assert stage.blockers() == {"a": (), "b": ("compile",), "c": ("max_num_seqs",), "d": ()}


def test_nothing_that_waited_was_held_back_if_every_request_was_admitted():
    stage = Watched()
    stage.add(request("a", 8))
    stage.step()
    assert stage.scheduler.stats().admission_limit == ""


def test_steps_are_recorded_with_their_sizes_and_times():
    stage = Watched()
    stage.add(request("a", 20), request("b", 10))
    plan = stage.schedule()
    stage.clock.advance(0.25)
    stage.update(plan)
    stage.step()
    assert list(stage.read().steps) == [WatchedStep(1, 30, 2, 0.25), WatchedStep(2, 2, 2, 0.0)]
    assert [step.step_number for step in stage.read(after_step=1).steps] == [2]


def test_steps_that_are_withdrawn_are_not_recorded():
    stage = Watched()
    stage.add(request("a", 8))
    stage.schedule()
    stage.scheduler.withdraw(now=2.0)
    stage.step()
    assert [step.step_number for step in stage.read().steps] == [2]


def test_recording_ends_by_itself_when_nothing_is_read():
    stage = Watched(max_model_len=4096, async_scheduling=True)
    stage.add(request("a", 8, max_tokens=4000))
    in_flight = []
    for _ in range(MAX_STEPS + 5):
        stage.overlap(in_flight)
    assert len(stage.read().steps) == MAX_STEPS
    for _ in range(3):
        stage.overlap(in_flight)
    # The step in flight at the first read is not recorded, and none of those before it.
    steps = [step.step_number for step in stage.read(after_step=MAX_STEPS).steps]
    assert steps == [MAX_STEPS + 6, MAX_STEPS + 7]
