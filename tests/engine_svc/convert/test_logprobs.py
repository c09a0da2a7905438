"""behaviour 116 on the wire: columns parallel to the tokens, NaN where nobody asked."""

from __future__ import annotations

import math
from array import array

from engine_svc.convert import messages
from engine_svc.core.step import PromptPlaces, TokenLogprobs
from engine_svc.loop.step_output import StepOutput, Told
from triptych.engine.v1 import step_pb2


def floats(column: bytes) -> list[float | None]:
    """An f32 column; None for NaN."""
    return [None if math.isnan(value) else value for value in array("f", column)]


def ints(column: bytes) -> list[int]:
    return array("I", column).tolist()


def step_of(output: StepOutput, told: Told) -> step_pb2.Step:
    output.tell(told)
    return messages.to_step(output, {})


def test_116_without_wishes_the_columns_are_empty():
    step = messages.to_step(StepOutput(1, [5], [1], [9]), {})
    assert (step.sampled_logprobs, step.sampled_ranks, step.HasField("top_logprobs")) == (b"", b"", False)
    assert not step.extras


def test_116_rows_that_asked_for_more_or_less_share_the_columns():
    told = Told(
        {
            6: TokenLogprobs([-0.5, -1.5], [1, 3], 2, [7, 8, 3, 4], [-0.5, -2.0, -0.25, -1.0]),
            8: TokenLogprobs([-3.0], [9], 1, [2], [-0.125]),
            9: TokenLogprobs([-4.0], [12]),
        }
    )
    step = step_of(StepOutput(1, [5, 6, 8, 9], [2, 2, 1, 1], [1, 2, 7, 4, 5, 6]), told)
    assert floats(step.sampled_logprobs) == [None, None, -0.5, -1.5, -3.0, -4.0]
    assert ints(step.sampled_ranks) == [0, 0, 1, 3, 9, 12]
    top = step.top_logprobs
    assert top.k == 2
    assert ints(top.token_ids) == [0] * 4 + [7, 8, 3, 4, 2, 0, 0, 0]
    assert floats(top.logprobs) == [None] * 4 + [-0.5, -2.0, -0.25, -1.0, -0.125, None, None, None]


def test_116_who_asks_for_no_other_token_gets_no_further_columns():
    step = step_of(StepOutput(1, [5], [1], [9]), Told({5: TokenLogprobs([-0.5], [1])}))
    assert floats(step.sampled_logprobs) == [-0.5]
    assert not step.HasField("top_logprobs")


def test_116_the_first_prompt_entry_is_none():
    places = [
        PromptPlaces(1, TokenLogprobs([-0.5, -1.0], [1, 2], 1, [3, 4], [-0.25, -0.75])),
        PromptPlaces(3, TokenLogprobs([-2.0], [5], 1, [6], [-0.5])),
    ]
    step = step_of(StepOutput(1, [5, 6], [1, 1], [8, 9]), Told(prompts={6: places}))
    assert [extra.row for extra in step.extras] == [1, 1]
    first, second = (extra.prompt_logprobs for extra in step.extras)
    assert (first.first_position, second.first_position) == (0, 3)
    assert (floats(first.logprobs), ints(first.ranks)) == ([None, -0.5, -1.0], [0, 1, 2])
    assert (ints(first.top.token_ids), floats(first.top.logprobs)) == ([0, 3, 4], [None, -0.25, -0.75])
    assert (floats(second.logprobs), ints(second.ranks), second.top.k) == ([-2.0], [5], 1)


def test_116_a_prompt_that_yields_no_token_yet_has_a_row_of_its_own():
    told = Told(prompts={9: [PromptPlaces(1, TokenLogprobs([], []))]})
    step = step_of(StepOutput(1, [5], [1], [8]), told)
    assert ints(step.handles) == [5, 9]
    assert step.num_tokens == b"\x01\x00"
    extra = step.extras[0]
    assert (extra.row, floats(extra.prompt_logprobs.logprobs)) == (1, [None])
    assert not extra.prompt_logprobs.HasField("top")
