"""Each position of a prompt goes out once, though a preempted request computes its prompt again."""

from __future__ import annotations

from engine_svc.core.request import FinishReason, Request, RequestOutput
from engine_svc.core.step import StepPlan, StepResult, TokenLogprobs
from engine_svc.features.prompt_logprobs.extras import PromptLogprobs, PromptLogprobSpec, PromptRun
from engine_svc.features.prompt_logprobs.scheduler import EachPositionOnce
from tests.engine_svc.scheduler.fakes import NEW_TOKEN, Stage, request


def run(first: int, num: int) -> PromptRun:
    """Logprobs of positions, each different from the others."""
    positions = range(first, first + num)
    return PromptRun(first, TokenLogprobs([-float(position) for position in positions], [*positions]))


def asking(request_id: str, num_tokens: int = 8, **options: int) -> Request:
    made = request(request_id, num_tokens, **options)
    made.extras[PromptLogprobSpec] = PromptLogprobSpec(0)
    return made


class Filtered:
    """One request `a` whose steps report whatever a test says."""

    def __init__(self) -> None:
        self.feature = EachPositionOnce()
        self.feature.on_add(asking("a"))

    def update(self, *runs: PromptRun) -> tuple[PromptRun, ...]:
        result = StepResult(1, [[], []], extras={PromptLogprobs: {1: PromptLogprobs(runs)}})
        self.feature.on_update(StepPlan(1, request_ids=["other", "a"]), result)
        left = result.extras[PromptLogprobs].get(1)
        return () if left is None else left.runs


def test_recomputed_positions_are_left_out():
    filtered = Filtered()
    steps = [(1, 4), (5, 2), (1, 3), (4, 5), (1, 8)]
    assert [filtered.update(run(*step)) for step in steps] == [
        (run(1, 4),), (run(5, 2),), (), (run(7, 2),), (),
    ]  # fmt: skip


def test_the_empty_run_of_a_prompt_of_one_token_goes_out_once_too():
    filtered = Filtered()
    assert filtered.update(run(1, 0)) == (run(1, 0),)
    assert filtered.update(run(1, 0)) == ()


def test_of_several_runs_those_that_are_new_are_left():
    filtered = Filtered()
    assert filtered.update(run(1, 3)) == (run(1, 3),)
    assert filtered.update(run(1, 2), run(3, 2), run(5, 1)) == (run(4, 1), run(5, 1))


def test_a_request_that_comes_again_gets_all_of_its_prompt():
    filtered = Filtered()
    filtered.update(run(1, 4))
    filtered.feature.on_finish(asking("a"))
    filtered.feature.on_update(StepPlan(2), StepResult(2, []))
    filtered.feature.on_add(asking("a"))
    assert filtered.update(run(1, 2)) == (run(1, 2),)


# With a scheduler: what the outputs of its requests have.


class LogprobStage(Stage):
    """A stage whose steps report every prompt position that they compute, as a runner does."""

    def update(self, plan: StepPlan, *arguments: object, **options: object) -> list[RequestOutput]:
        result = StepResult(plan.step_number, [[NEW_TOKEN] if samples else [] for samples in plan.samples])
        found = {}
        rows = zip(plan.request_ids, plan.num_computed_tokens, plan.num_tokens, strict=True)
        for row, (request_id, computed, num_tokens) in enumerate(rows):
            if request_id in self.prompts:
                end = min(computed + num_tokens + 1, self.prompts[request_id])
                if computed == 0 or end > computed + 1:
                    found[row] = PromptLogprobs((run(computed + 1, max(0, end - computed - 1)),))
        result.extras = {PromptLogprobs: found}
        return self.scheduler.update(plan, result, self.now)

    prompts: dict[str, int]

    def ask(self, *requests: Request) -> None:
        self.prompts = {one.request_id: one.num_prompt_tokens for one in requests}
        self.add(*requests)


def positions_of(outputs: list[RequestOutput], request_id: str) -> list[int]:
    return [
        position
        for output in outputs
        if output.request_id == request_id and output.extras is not None and PromptLogprobs in output.extras
        for part in output.extras[PromptLogprobs].runs
        for position in range(part.first_position, part.end_position)
    ]


def test_a_request_that_ends_with_its_first_token_gets_its_prompt_with_it():
    stage = LogprobStage(features=[EachPositionOnce()])
    stage.ask(asking("a", max_tokens=1), asking("b", 5, max_tokens=3))
    outputs = stage.update(stage.schedule())
    assert [(output.request_id, output.finish_reason) for output in outputs] == [
        ("a", FinishReason.LENGTH), ("b", None),
    ]  # fmt: skip
    assert positions_of(outputs, "a") == [*range(1, 8)]
    assert positions_of(outputs, "b") == [*range(1, 5)]
    assert positions_of(stage.update(stage.schedule()), "b") == []


def test_chunks_of_a_prompt_have_outputs_without_tokens():
    stage = LogprobStage(features=[EachPositionOnce()], max_num_batched_tokens=5)
    stage.ask(asking("a", 12))
    first, second, third = (stage.update(stage.schedule()) for _ in range(3))
    assert [output.new_token_ids for output in first + second + third] == [[], [], [NEW_TOKEN]]
    assert positions_of(first, "a") == [*range(1, 6)]
    assert positions_of(first + second + third, "a") == [*range(1, 12)]


def test_preempted_requests_report_each_position_once_with_steps_in_flight():
    stage = LogprobStage(
        features=[EachPositionOnce()],
        num_blocks=13,
        block_size=4,
        max_num_batched_tokens=10,
        async_scheduling=True,
        enable_prefix_caching=False,
        reserve_full_prompt=False,
    )
    requests = [asking(name, 14 + 3 * index, max_tokens=20) for index, name in enumerate("abc")]
    stage.ask(*requests)
    in_flight: list[StepPlan] = []
    outputs: list[RequestOutput] = []
    for _ in range(400):
        outputs += stage.overlap(in_flight)
        if not stage.scheduler.has_work and not in_flight:
            break
    assert [one.finish_reason for one in requests] == [FinishReason.LENGTH] * 3
    assert sum(one.num_preemptions for one in requests) >= 2
    for one in requests:
        assert positions_of(outputs, one.request_id) == [*range(1, one.num_prompt_tokens)]


def test_positions_of_a_step_that_was_rolled_back_are_still_to_come():
    stage = LogprobStage(features=[EachPositionOnce()], max_num_batched_tokens=6)
    stage.ask(asking("a", 10))
    outputs = stage.update(stage.schedule())
    stage.schedule()
    stage.scheduler.withdraw(now=9.0)
    for _ in range(4):
        outputs += stage.update(stage.schedule())
    assert positions_of(outputs, "a") == [*range(1, 10)]


def test_a_request_that_ends_with_an_error_has_its_whole_prompt_however_it_was_divided():
    ends = []
    for chunks in ([8], [5, 3]):
        stage = Stage(max_num_batched_tokens=max(chunks), features=[EachPositionOnce()])
        stage.add(asking("a"))
        found, first = [], 1
        for num_tokens in chunks:
            plan = stage.schedule()
            is_last = num_tokens == chunks[-1]
            result = StepResult(plan.step_number, [[7] if is_last else []], barred=[0] if is_last else [])
            num_positions = num_tokens - is_last
            result.extras[PromptLogprobs] = {0: PromptLogprobs((run(first, num_positions),))}
            first += num_positions
            result.clear_faulty()
            (output,) = stage.scheduler.update(plan, result, 1.0)
            for each in output.extras[PromptLogprobs].runs:
                found += each.token_logprobs.ranks
        ends.append((output.finish_reason, found))
    assert ends == [(FinishReason.ERROR, [*range(1, 8)])] * 2
