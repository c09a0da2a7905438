"""Each position goes out once, without those of rejected drafts."""

from __future__ import annotations

from engine_svc.core.request import FinishReason, Request, RequestOutput
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.forward_outputs.extras import ForwardOutputs, ForwardOutputSpec, PositionRun
from engine_svc.features.forward_outputs.scheduler import ComputedOnce
from tests.engine_svc.scheduler.fakes import NEW_TOKEN, Stage, request


def run(first: int, num: int) -> PositionRun:
    """Each position's state is its number."""
    return PositionRun(first, num, bytes(range(first, first + num)))


def asking(request_id: str, num_tokens: int = 8, **options: int) -> Request:
    made = request(request_id, num_tokens, **options)
    made.extras[ForwardOutputSpec] = ForwardOutputSpec(hidden_states=True, routed_experts=False)
    return made


class Filtered:
    """One request `a` whose steps report whatever a test says."""

    def __init__(self) -> None:
        self.feature = ComputedOnce()
        self.feature.on_add(asking("a"))

    def update(
        self,
        computed: PositionRun,
        sampled: tuple[int, ...] = (),
        drafts: tuple[int, ...] = (),
        verified: list[int] | None = None,
    ) -> PositionRun | None:
        result = StepResult(1, [[], list(sampled)], extras={ForwardOutputs: {1: ForwardOutputs((computed,))}})
        result.num_drafts = verified or []
        plan = StepPlan(1, request_ids=["other", "a"], draft_token_ids=[[], list(drafts)])
        self.feature.on_update(plan, result)
        left = result.extras[ForwardOutputs].get(1)
        return None if left is None else left.runs[0]


def test_recomputed_positions_are_left_out():
    filtered = Filtered()
    steps = [run(0, 4), run(4, 2), run(0, 3), run(3, 5), run(0, 9)]
    assert [filtered.update(step) for step in steps] == [run(0, 4), run(4, 2), None, run(6, 2), run(8, 1)]


def test_positions_of_rejected_drafts_are_left_out_and_come_with_the_tokens_in_their_place():
    filtered = Filtered()
    assert filtered.update(run(0, 8), (9,)) == run(0, 8)
    assert filtered.update(run(8, 4), (1, 2), (1, 7, 7)) == run(8, 2)
    assert filtered.update(run(10, 3), (3, 4, 5), (3, 4)) == run(10, 3)
    # Three were planned, and one was there to be verified.
    assert filtered.update(run(13, 2), (6,), (1, 1, 1), [0, 1]) == run(13, 1)


def test_a_request_that_comes_again_gets_all_positions():
    filtered = Filtered()
    filtered.update(run(0, 4))
    filtered.feature.on_finish(asking("a"))
    filtered.feature.on_update(StepPlan(2), StepResult(2, []))
    filtered.feature.on_add(asking("a"))
    assert filtered.update(run(0, 2)) == run(0, 2)


class ReportingStage(Stage):
    """A stage whose steps report every position that they compute, as a runner does."""

    def update(self, plan: StepPlan, *arguments: object, **options: object) -> list[RequestOutput]:
        result = StepResult(plan.step_number, [[NEW_TOKEN] if samples else [] for samples in plan.samples])
        rows = enumerate(zip(plan.num_computed_tokens, plan.num_tokens, strict=True))
        result.extras = {ForwardOutputs: {row: ForwardOutputs((run(*columns),)) for row, columns in rows}}
        return self.scheduler.update(plan, result, self.now)


def test_preempted_requests_report_each_position_once_with_steps_in_flight():
    stage = ReportingStage(
        features=[ComputedOnce()],
        num_blocks=13,
        block_size=4,
        max_num_batched_tokens=10,
        async_scheduling=True,
        enable_prefix_caching=False,
        reserve_full_prompt=False,
    )
    requests = [asking(name, 14 + 3 * index, max_tokens=20) for index, name in enumerate("abc")]
    stage.add(*requests)
    in_flight: list[StepPlan] = []
    outputs: list[RequestOutput] = []
    for _ in range(400):
        outputs += stage.overlap(in_flight)
        if not stage.scheduler.has_work and not in_flight:
            break
    assert [one.finish_reason for one in requests] == [FinishReason.LENGTH] * 3
    assert sum(one.num_preemptions for one in requests) >= 2
    for one in requests:
        states = b"".join(
            each.hidden_states
            for output in outputs
            if output.request_id == one.request_id and output.extras
            for each in output.extras[ForwardOutputs].runs
        )
        assert list(states) == [*range(one.num_prompt_tokens + 19)]
