"""What steps compute of a request's positions goes out once, though a preempted request computes it again."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.core.extras import Extra, OutputExtra
from engine_svc.core.request import FinishReason, Request, RequestOutput
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.scheduler.each_position_once import EachPositionOnce
from tests.engine_svc.scheduler.fakes import NEW_TOKEN, Stage, request


class Asks(Extra):
    """Of a request whose positions are reported."""


@dataclass(frozen=True, slots=True)
class Positions(OutputExtra):
    """The numbers of positions."""

    numbers: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.numbers)

    def merged(self, later: Positions) -> Positions:
        return Positions(self.numbers + later.numbers)

    def split(self, max_bytes: int) -> list[Positions]:
        return [self]


def rest(computed: Positions, position: int, num_rejected: int) -> tuple[Positions, int] | None:
    settled = computed.numbers[: len(computed.numbers) - num_rejected]
    left = tuple(number for number in settled if number >= position)
    return (Positions(left), left[-1] + 1) if left else None


def make_feature() -> EachPositionOnce[Positions]:
    return EachPositionOnce(Asks, Positions, rest)


def asking(request_id: str, num_tokens: int = 8, **options: int) -> Request:
    made = request(request_id, num_tokens, **options)
    made.extras[Asks] = Asks()
    return made


class Filtered:
    """One request `a` whose steps report whatever a test says."""

    def __init__(self) -> None:
        self.feature = make_feature()
        self.feature.on_add(asking("a"))

    def update(
        self,
        computed: range,
        sampled: tuple[int, ...] = (),
        drafts: tuple[int, ...] = (),
        verified: list[int] | None = None,
    ) -> list[int]:
        result = StepResult(1, [[], list(sampled)], extras={Positions: {1: Positions(tuple(computed))}})
        result.num_drafts = verified or []
        plan = StepPlan(1, request_ids=["other", "a"], draft_token_ids=[[], list(drafts)])
        self.feature.on_update(plan, result)
        left = result.extras[Positions].get(1)
        return [] if left is None else list(left.numbers)


def test_recomputed_positions_are_left_out():
    filtered = Filtered()
    steps = [range(4), range(4, 6), range(3), range(3, 8), range(9)]
    assert [filtered.update(step) for step in steps] == [[0, 1, 2, 3], [4, 5], [], [6, 7], [8]]


def test_positions_of_rejected_drafts_are_left_out_and_come_with_the_tokens_in_their_place():
    filtered = Filtered()
    assert filtered.update(range(8), (9,)) == [*range(8)]
    assert filtered.update(range(8, 12), (1, 2), (1, 7, 7)) == [8, 9]
    assert filtered.update(range(10, 13), (3, 4, 5), (3, 4)) == [10, 11, 12]
    # Three were planned, and one was there to be verified.
    assert filtered.update(range(13, 15), (6,), (1, 1, 1), [0, 1]) == [13]


def test_a_request_that_comes_again_gets_all_positions():
    filtered = Filtered()
    filtered.update(range(4))
    filtered.feature.on_finish(asking("a"))
    filtered.feature.on_update(StepPlan(2), StepResult(2, []))
    filtered.feature.on_add(asking("a"))
    assert filtered.update(range(2)) == [0, 1]


class ReportingStage(Stage):
    """A stage whose steps report every position that they compute, as a runner does."""

    def update(self, plan: StepPlan, *arguments: object, **options: object) -> list[RequestOutput]:
        result = StepResult(plan.step_number, [[NEW_TOKEN] if samples else [] for samples in plan.samples])
        rows = enumerate(zip(plan.num_computed_tokens, plan.num_tokens, strict=True))
        result.extras = {
            Positions: {row: Positions(tuple(range(first, first + num))) for row, (first, num) in rows}
        }
        return self.scheduler.update(plan, result, self.now)


def positions_of(outputs: list[RequestOutput], request_id: str) -> list[int]:
    return [
        number
        for output in outputs
        if output.request_id == request_id and output.extras and Positions in output.extras
        for number in output.extras[Positions].numbers
    ]


def test_a_request_that_ends_with_its_first_token_gets_its_positions_with_it():
    stage = ReportingStage(features=[make_feature()])
    stage.add(asking("a", max_tokens=1), asking("b", 5, max_tokens=3))
    outputs = stage.update(stage.schedule())
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH, None]
    assert positions_of(outputs, "a") == [*range(8)]
    assert positions_of(outputs, "b") == [*range(5)]
    assert positions_of(stage.update(stage.schedule()), "b") == [5]


def test_chunks_of_a_prompt_have_outputs_without_tokens():
    stage = ReportingStage(features=[make_feature()], max_num_batched_tokens=5)
    stage.add(asking("a", 12))
    first, second, third = (stage.update(stage.schedule()) for _ in range(3))
    assert [output.new_token_ids for output in first + second + third] == [[], [], [NEW_TOKEN]]
    assert positions_of(first, "a") == [*range(5)]
    assert positions_of(first + second + third, "a") == [*range(12)]


def test_positions_of_a_step_that_was_rolled_back_are_still_to_come():
    stage = ReportingStage(features=[make_feature()], max_num_batched_tokens=6)
    stage.add(asking("a", 10, max_tokens=3))
    outputs = stage.update(stage.schedule())
    stage.schedule()
    stage.scheduler.withdraw(now=9.0)
    for _ in range(4):
        outputs += stage.update(stage.schedule())
    assert positions_of(outputs, "a") == [*range(12)]


def test_preempted_requests_report_each_position_once_with_steps_in_flight():
    stage = ReportingStage(
        features=[make_feature()],
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
        assert positions_of(outputs, one.request_id) == [*range(one.num_prompt_tokens + 19)]
