"""When the scheduler calls a feature: before each step, and while nothing can be computed."""

from __future__ import annotations

from engine_svc.scheduler.config import PauseState
from engine_svc.scheduler.feature import SchedulerFeature
from tests.engine_svc.scheduler.doubles import BlockHolder
from tests.engine_svc.scheduler.fakes import Stage, request


class Timed(SchedulerFeature):
    """Is due at an instant, until then."""

    def __init__(self, due_at: float) -> None:
        self._due_at = due_at
        self.called_at: list[float] = []

    def on_step(self, now: float) -> float | None:
        self.called_at.append(now)
        return self._due_at if now < self._due_at else None


class ReleasesAtStep(BlockHolder):
    """Releases what it holds before a step, from an instant on."""

    def on_step(self, now: float) -> float | None:
        if now >= 4.0:
            self.release_held()
        return None


def test_a_feature_is_called_before_each_step_also_while_all_is_paused():
    timed = Timed(2.0)
    stage = Stage(features=[timed])
    stage.add(request("a", 8))
    stage.step()
    stage.scheduler.set_pause(PauseState.ALL)
    stage.step()
    assert timed.called_at == [1.0, 2.0]


def test_blocks_that_a_feature_releases_before_a_step_are_used_in_it():
    holder = ReleasesAtStep()
    stage = Stage(num_blocks=4, features=[holder])
    holder.kv_cache = stage.cache
    stage.add(request("a", 40, max_tokens=1))
    stage.step()
    stage.add(request("b", 40, max_tokens=1))
    assert [stage.step().request_ids for _ in range(3)] == [[], [], ["b"]]


def test_an_idle_loop_learns_when_the_first_feature_is_due():
    stage = Stage(features=[Timed(9.0), Timed(5.0), BlockHolder(), Timed(0.5)])
    assert stage.scheduler.on_idle(1.0) == 5.0
    assert stage.scheduler.on_idle(6.0) == 9.0
    assert stage.scheduler.on_idle(9.0) is None
