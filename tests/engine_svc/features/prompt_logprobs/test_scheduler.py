"""What goes out of a step's prompt positions: those that are new."""

from __future__ import annotations

import pytest

from engine_svc.core.request import FinishReason
from engine_svc.core.step import StepResult, TokenLogprobs
from engine_svc.features.prompt_logprobs.extras import PromptLogprobs, PromptLogprobSpec, PromptRun
from engine_svc.features.prompt_logprobs.scheduler import rest
from engine_svc.scheduler.each_position_once import EachPositionOnce
from tests.engine_svc.scheduler.fakes import Stage, request


def logprobs(first: int, num: int) -> PromptLogprobs:
    """Those of positions, each different from the others."""
    positions = range(first, first + num)
    columns = TokenLogprobs([-float(position) for position in positions], [*positions])
    return PromptLogprobs((PromptRun(first, columns),))


@pytest.mark.parametrize(("position", "left"), [(0, (4, 5)), (4, (4, 5)), (6, (6, 3)), (9, None)])
def test_the_new_positions_are_left(position: int, left: tuple[int, int] | None):
    expected = None if left is None else (logprobs(*left), sum(left))
    assert rest(logprobs(4, 5), position, 0) == expected


def test_the_empty_run_of_a_prompt_of_one_token_goes_out_once():
    assert rest(logprobs(1, 0), 0, 0) == (logprobs(1, 0), 1)
    assert rest(logprobs(1, 0), 1, 0) is None


def test_a_request_that_ends_with_an_error_has_its_whole_prompt_however_it_was_divided():
    ends = []
    for chunks in ([8], [5, 3]):
        feature = EachPositionOnce(PromptLogprobSpec, PromptLogprobs, rest)
        stage = Stage(max_num_batched_tokens=max(chunks), features=[feature])
        asking = request("a", 8)
        asking.extras[PromptLogprobSpec] = PromptLogprobSpec(0)
        stage.add(asking)
        found, first = [], 1
        for num_tokens in chunks:
            plan = stage.schedule()
            is_last = num_tokens == chunks[-1]
            result = StepResult(plan.step_number, [[7] if is_last else []], barred=[0] if is_last else [])
            num_positions = num_tokens - is_last
            result.extras[PromptLogprobs] = {0: logprobs(first, num_positions)}
            first += num_positions
            result.clear_faulty()
            (output,) = stage.scheduler.update(plan, result, 1.0)
            for each in output.extras[PromptLogprobs].runs:
                found += each.token_logprobs.ranks
        ends.append((output.finish_reason, found))
    assert ends == [(FinishReason.ERROR, [*range(1, 8)])] * 2
