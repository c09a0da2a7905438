"""Resumable requests in the loop: ends of turns, further segments, and how long and how many may be idle."""

from __future__ import annotations

from collections.abc import Callable

from engine_svc.core.extras import Extra
from engine_svc.core.request import FinishReason, InputSegment, Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan
from engine_svc.loop.engine import Engine
from engine_svc.loop.failure_bisection import UNREADY
from engine_svc.loop.mailbox import Add, CancelTurn, Extend, Inbox, StatsSnapshot
from engine_svc.loop.preparation import Preparations
from engine_svc.loop.protocols import NoLockstep
from engine_svc.loop.requests import IdleLimits
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.fakes import MAX_MODEL_LEN, FakeExecutor, expected_tokens, make_scheduler
from tests.engine_svc.loop.frontend import Frontend
from triptych_kit.clock import FakeClock

PROMPT = [3, 4, 5]


class Rig:
    """An engine whose turns the test takes; it begins with one resumable request of two tokens."""

    def __init__(
        self,
        *,
        limits: IdleLimits = IdleLimits(60.0, 8),  # noqa: B008  Frozen.
        on_launch: Callable[[StepPlan], None] = lambda plan: None,
        prepares: bool = False,
        deadline_at: float | None = None,
    ) -> None:
        self.clock, self.inbox, self.stats_snapshot = FakeClock(), Inbox(max_commands=100), StatsSnapshot()
        preparations = Preparations(None, self.clock)
        self.scheduler = make_scheduler(features=[preparations] if prepares else ())
        self.frontend = Frontend()
        self.engine = Engine(
            scheduler=self.scheduler,
            executor=FakeExecutor(on_launch),
            inbox=self.inbox,
            stats_snapshot=self.stats_snapshot,
            clock=self.clock,
            lockstep=NoLockstep(),
            preparations=preparations,
            idle_limits=limits,
        )
        self.add(0, deadline_at)
        self.run()

    def add(self, handle: int, deadline_at: float | None = None) -> None:
        request = Request(
            f"r{handle}", list(PROMPT), len(PROMPT), SamplingParams(max_tokens=2, seed=1), is_resumable=True
        )
        self.inbox.put(Add(request, self.frontend.outbox, handle, deadline_at))

    def extend(self, *token_ids: int, handle: int = 0, deadline_at: float | None = None) -> None:
        segment = InputSegment(list(token_ids), SamplingParams(max_tokens=3, seed=2))
        self.inbox.put(Extend(f"r{handle}", segment, deadline_at))

    def run(self) -> None:
        """Until there is no work."""
        while self.engine.turn():
            pass
        self.frontend.read_all()

    @property
    def ends(self) -> list[tuple[int, FinishReason]]:
        return self.frontend.ends


def test_a_turn_answers_all_tokens_before_it_but_the_last_of_the_turn_before():
    rig = Rig()
    first = rig.frontend.tokens.pop(0)
    assert (first, rig.frontend.end_of[0].turn_ended) == (expected_tokens(PROMPT, 1, 2), True)
    rig.extend(8, 9)
    rig.run()
    assert rig.frontend.tokens[0] == expected_tokens([*PROMPT, first[0], 8, 9], 2, 3)
    rig.inbox.put(Extend("r0", None))
    rig.run()
    assert rig.ends == [(0, FinishReason.LENGTH), (0, FinishReason.LENGTH), (0, FinishReason.ABORT)]
    assert not rig.frontend.end_of[0].turn_ended
    loop_stats = rig.stats_snapshot.read()
    assert (loop_stats.num_finished, loop_stats.num_prompt_tokens) == (1, 5)
    assert num_unfinished(rig.scheduler) == 0


def test_without_further_input_the_end_of_a_turn_that_runs_is_the_last():
    rig = Rig()
    rig.extend(8)
    rig.engine.turn()
    rig.inbox.put(Extend("r0", None))
    rig.run()
    assert (rig.ends[-1], rig.frontend.end_of[0].turn_ended) == ((0, FinishReason.LENGTH), False)


def test_a_cancelled_turn_ends_with_its_next_token_and_one_that_has_ended_does_not():
    rig = Rig()
    rig.inbox.put(CancelTurn("r0"))
    rig.extend(8)
    rig.engine.turn()
    assert rig.scheduler.has_work
    rig.inbox.put(CancelTurn("r0"))
    rig.run()
    assert (rig.ends[-1], rig.frontend.end_of[0].turn_ended) == ((0, FinishReason.ABORT), True)
    assert len(rig.frontend.tokens[0]) == 2 + 2


def test_a_request_that_is_idle_for_too_long_ends():
    rig = Rig(deadline_at=5.0)
    rig.clock.advance(59.0)
    rig.run()
    assert len(rig.ends) == 1
    rig.clock.advance(1.0)
    rig.run()
    assert rig.ends[1:] == [(0, FinishReason.ABORT)]
    assert rig.stats_snapshot.counts.aborted.values[("idle",)] == 1
    rig.extend(8)
    rig.run()
    assert len(rig.ends) == 2


def test_each_turn_has_its_own_deadline():
    rig = Rig()
    rig.extend(8, deadline_at=rig.clock.now() + 5.0)
    rig.engine.turn()
    rig.clock.advance(5.0)
    rig.run()
    assert rig.ends[1:] == [(0, FinishReason.ABORT)]
    assert rig.stats_snapshot.counts.aborted.values[("deadline",)] == 1


def test_of_too_many_idle_requests_the_one_that_waits_longest_ends():
    rig = Rig(limits=IdleLimits(60.0, 2))
    rig.add(1)
    rig.run()
    rig.extend(8)
    rig.run()
    rig.add(2)
    rig.run()
    assert rig.ends[-1] == (1, FinishReason.ABORT)
    assert num_unfinished(rig.scheduler) == 2


def test_a_segment_that_is_too_long_ends_the_request_with_the_reason():
    rig = Rig()
    rig.extend(*range(MAX_MODEL_LEN))
    rig.run()
    end = rig.frontend.end_of[0]
    assert (end.reason, end.code, end.error_reason) == (FinishReason.ERROR, "INVALID_ARGUMENT", "NEVER_FITS")
    assert num_unfinished(rig.scheduler) == 0


class Prepared(Extra):
    blocker = "prepared"


def test_a_turn_that_cannot_begin_ends_the_request_alone():
    rig = Rig(prepares=True)
    rig.add(1)
    rig.inbox.put(
        Extend("r0", InputSegment([8], SamplingParams(max_tokens=3), extras={Prepared: Prepared()}))
    )
    rig.run()
    assert (rig.frontend.end_of[0].reason, rig.frontend.end_of[0].message) == (FinishReason.ERROR, UNREADY)
    assert rig.frontend.end_of[1].turn_ended


def test_a_turn_whose_step_fails_runs_again():
    failing = iter([False, False, True])

    def fail(plan: StepPlan) -> None:
        if next(failing, False):
            raise RuntimeError("the step fails")

    rig = Rig(on_launch=fail)
    first = rig.frontend.tokens.pop(0)
    rig.extend(8, 9)
    rig.run()
    assert rig.frontend.tokens[0] == expected_tokens([*PROMPT, first[0], 8, 9], 2, 3)
    assert rig.frontend.end_of[0].turn_ended
