"""When the scheduler calls a feature: before each step, and while nothing can be computed."""

from __future__ import annotations

from engine_svc.core.request import Request
from engine_svc.scheduler.config import PauseState
from engine_svc.scheduler.feature import SchedulerFeature
from tests.engine_svc.scheduler.doubles import AtMost, BlockHolder, Retainer
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


class SeesPreemptions(SchedulerFeature):
    """Notes which requests were preempted, and what each had computed by then."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_preempt(self, request: Request) -> None:
        self.seen.append((request.request_id, request.num_computed_tokens))


def test_a_feature_learns_of_a_preemption_before_the_next_request_is_planned():
    feature = SeesPreemptions()
    stage = Stage(num_blocks=5, block_size=4, features=[feature])
    stage.add(request("a", 4), request("b", 8))
    stage.step()
    assert feature.seen == []
    plan = stage.schedule()
    assert plan.preempted == ["b"]
    assert feature.seen == [("b", 0)]


class SeesFailedAdmissions(SchedulerFeature):
    """Notes which requests found no blocks."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_not_admitted(self, request: Request) -> None:
        self.seen.append(request.request_id)


def test_a_feature_learns_which_request_found_no_blocks():
    """The others were not tried, and one whose budgets grant nothing has spent none."""
    feature = SeesFailedAdmissions()
    stage = Stage(num_blocks=4, features=[feature], budgets=[AtMost({"never": 0})])
    stage.add(request("a", 20))
    stage.step()
    assert feature.seen == []
    stage.add(request("b", 40), request("c", 40))
    stage.step()
    assert feature.seen == ["b"]
    stage.scheduler.abort(["b", "c"], now=3.0)
    stage.add(request("never", 4))
    stage.step()
    assert feature.seen == ["b"]


def test_a_feature_learns_that_running_requests_are_preempted_where_steps_are_rolled_back():
    feature = SeesPreemptions()
    stage = Stage(features=[feature])
    stage.add(request("a", 8))
    stage.schedule()
    stage.scheduler.withdraw(now=2.0)
    assert feature.seen == [("a", 0)]


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


class GivesUp(Retainer):
    """Retains the blocks of one request, until it is asked for blocks by one of the two hooks."""

    def __init__(self, answers: str) -> None:
        super().__init__()
        self._answers = answers
        self.asked: list[str] = []

    def on_finish(self, request: Request) -> None:
        if request.request_id == "retained":
            super().on_finish(request)

    def on_pressure(self, is_running: bool) -> bool:
        return self._release("pressure" if is_running else "pressure of waiting")

    def on_exhausted(self) -> bool:
        return self._release("exhausted")

    def _release(self, name: str) -> bool:
        self.asked.append(name)
        if name != self._answers or self.kv_cache is None or "retained" not in self.kv_cache.retained:
            return False
        self.kv_cache.retained.release("retained")
        return True


def stage_with_retained(feature: GivesUp, *, num_tokens: int) -> Stage:
    """6 blocks of 16 tokens, of which those that `num_tokens` tokens fill are retained."""
    stage = Stage(num_blocks=7, features=[feature])
    stage.add(request("retained", num_tokens, max_tokens=1))
    stage.step_until_idle()
    feature.asked.clear()
    return stage


def test_nothing_is_asked_for_while_there_are_blocks():
    feature = GivesUp("pressure")
    stage = stage_with_retained(feature, num_tokens=40)
    stage.add(request("a", 30, max_tokens=30))
    stage.step_until_idle()
    assert feature.asked == []


def test_a_running_request_has_blocks_that_are_given_up_under_pressure():
    feature = GivesUp("pressure")
    stage = stage_with_retained(feature, num_tokens=40)
    stage.add(request("a", 30, max_tokens=10), request("b", 30, max_tokens=10))
    stage.step_until_idle()
    assert feature.asked == ["pressure"]
    assert stage.scheduler.stats().num_preemptions == 0


def test_others_are_preempted_before_blocks_are_given_up_that_only_exhaustion_frees():
    feature = GivesUp("exhausted")
    stage = stage_with_retained(feature, num_tokens=40)
    stage.add(request("a", 30, max_tokens=10), request("b", 30, max_tokens=10))
    stage.step_until_idle()
    # The request that was preempted waits for the other to end.
    assert set(feature.asked) == {"pressure", "pressure of waiting"}
    assert stage.scheduler.stats().num_preemptions == 1
    assert "retained" in stage.cache.retained


def test_a_waiting_request_has_blocks_that_are_given_up_under_pressure():
    feature = GivesUp("pressure of waiting")
    stage = stage_with_retained(feature, num_tokens=40)
    stage.add(request("a", 30), request("b", 40))
    assert stage.step().request_ids == ["a", "b"]
    assert feature.asked == ["pressure of waiting"]


def test_a_request_that_would_run_alone_exhausts_what_is_retained():
    feature = GivesUp("exhausted")
    stage = stage_with_retained(feature, num_tokens=50)
    stage.add(request("a", 60))
    assert stage.step().request_ids == ["a"]
    assert feature.asked == ["pressure of waiting", "exhausted"]


def test_a_request_that_runs_alone_goes_on_with_what_is_retained():
    feature = GivesUp("exhausted")
    stage = stage_with_retained(feature, num_tokens=50)
    stage.add(request("a", 40, max_tokens=20))
    stage.step_until_idle()
    assert feature.asked == ["pressure", "exhausted"]
    assert stage.scheduler.stats().num_preemptions == 0
