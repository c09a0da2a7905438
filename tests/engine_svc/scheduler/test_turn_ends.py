"""What ends a request, and what wins over what."""

from __future__ import annotations

import pytest

from engine_svc.core.request import FinishReason, Request
from engine_svc.core.sampling_params import RepetitionLimits
from engine_svc.scheduler.turns import note_limits, repeats_itself, why_stopped
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.scheduler.fakes import EOS, Stage, request

STOP = 42


@pytest.mark.parametrize(
    ("max_model_len", "most"), [(100, 24), (25, 24), (24, 24), (23, 23)], ids=lambda value: str(value)
)
def test_a_request_ends_at_its_own_length_or_that_of_the_model(max_model_len: int, most: int):
    limited = request("a", 8, max_tokens=16)
    note_limits(limited, max_model_len)
    assert (limited.max_num_tokens, limited.check_from) == (most, most)


@pytest.mark.parametrize(("min_tokens", "check_from"), [(0, 8), (5, 13), (15, 23), (16, 24), (17, 24)])
def test_repetition_is_looked_for_from_the_minimum_on(min_tokens: int, check_from: int):
    limited = request("a", 8, max_tokens=16, min_tokens=min_tokens, repetition=RepetitionLimits(3))
    note_limits(limited, 100)
    assert limited.check_from == check_from


def _with_output(output: list[int], **options: object) -> Request:
    ended = request("a", 4, **options)
    note_limits(ended, 100)
    ended.token_ids += output
    return ended


# Row 185.
@pytest.mark.parametrize(
    ("output", "options", "verdict"),
    [
        ([EOS], {}, (FinishReason.STOP, None)),
        ([EOS], {"ignore_eos": True}, None),
        ([STOP], {}, None),
        ([STOP], {"stop_token_ids": [41, STOP]}, (FinishReason.STOP, STOP)),
        ([EOS], {"stop_token_ids": [EOS]}, (FinishReason.STOP, None)),
        ([EOS], {"stop_token_ids": [EOS], "ignore_eos": True}, (FinishReason.STOP, EOS)),
        ([5, 6], {"max_tokens": 3}, None),
        ([5, 6, 7], {"max_tokens": 3}, (FinishReason.LENGTH, None)),
        ([5, 6, EOS], {"max_tokens": 3}, (FinishReason.STOP, None)),
        ([5, 6, STOP], {"max_tokens": 3, "stop_token_ids": [STOP]}, (FinishReason.STOP, STOP)),
        ([5, 5], {"repetition": RepetitionLimits(1)}, (FinishReason.REPETITION, None)),
        ([5, 6], {"repetition": RepetitionLimits(1)}, None),
        ([5, 5], {"repetition": RepetitionLimits(1), "max_tokens": 2}, (FinishReason.LENGTH, None)),
        ([EOS, EOS], {"repetition": RepetitionLimits(1)}, (FinishReason.STOP, None)),
        ([5, 5], {"repetition": RepetitionLimits(1), "min_tokens": 2}, (FinishReason.REPETITION, None)),
        ([5, 5], {"repetition": RepetitionLimits(1), "min_tokens": 3}, None),
    ],
)
def test_the_first_of_stop_length_and_repetition_wins(output, options, verdict):
    assert why_stopped(_with_output(output, **options)) == verdict


@pytest.mark.parametrize(
    ("output", "limits", "repeats"),
    [
        ([1, 2, 3] * 3, RepetitionLimits(3, 2, 3), True),
        ([1, 2, 3] * 2, RepetitionLimits(3, 2, 3), False),
        ([9, 1, 2, 3, 1, 2, 3, 1, 2, 3], RepetitionLimits(3, 2, 3), True),
        ([8, 9, 5, 6, 5, 6, 5, 6], RepetitionLimits(3, 2, 3), True),
        ([5, 6, 5, 6, 5, 6], RepetitionLimits(3, 2, 3), True),
        ([6, 5, 6, 5, 6], RepetitionLimits(3, 2, 3), False),
        ([10, 20] * 3, RepetitionLimits(3, 3, 3), False),
        ([10, 20] * 3, RepetitionLimits(3, 2, 3), True),
        ([4, 4, 4], RepetitionLimits(3, 2, 3), False),
        ([4, 4, 4], RepetitionLimits(3, 1, 3), True),
        ([4, 4], RepetitionLimits(3, 1, 3), False),
        ([1, 2, 3, 4] * 3, RepetitionLimits(3, 1, 3), False),
        ([1, 2, 3, 4] * 3, RepetitionLimits(4, 1, 3), True),
        # The last token fits a pattern of two, those before do not.
        ([1, 2, 9, 2], RepetitionLimits(2, 2, 2), False),
        # Only what stands at the end counts.
        ([5, 5, 5, 6], RepetitionLimits(3, 1, 3), False),
        ([], RepetitionLimits(1), False),
        ([4], RepetitionLimits(1), False),
    ],
)
def test_a_pattern_counts_when_it_ends_the_output_often_enough(output, limits, repeats):
    """Behaviour 121 has these numbers."""
    prompt = [70, 71, 72, 73]
    assert repeats_itself(prompt + output, len(prompt), limits) is repeats


@pytest.mark.parametrize(("output", "repeats"), [([5], False), ([5, 5], False), ([5, 5, 5], True)])
def test_the_prompt_may_repeat_itself_as_it_likes(output: list[int], repeats: bool):
    prompt = [5] * 6
    assert repeats_itself(prompt + output, len(prompt), RepetitionLimits(2, 1, 3)) is repeats


def test_an_output_that_repeats_itself_is_ended_at_the_token_that_completes_the_pattern():
    stage = Stage()
    stage.add(request("a", 8, repetition=RepetitionLimits(2, 2, 2)))
    ended = [stage.update(stage.schedule(), {"a": [token]})[0].finish_reason for token in (4, 5, 4, 5)]
    assert ended == [None, None, None, FinishReason.REPETITION]
    assert num_unfinished(stage.scheduler) == 0


def test_below_the_minimum_an_output_may_repeat_itself():
    stage = Stage()
    repeating = request("a", 8, min_tokens=4, repetition=RepetitionLimits(1, 1, 2))
    stage.add(repeating)
    for _ in range(3):
        [output] = stage.update(stage.schedule(), {"a": [4]})
        assert output.finish_reason is None
    [output] = stage.update(stage.schedule(), {"a": [4]})
    assert output.finish_reason is FinishReason.REPETITION
    assert repeating.num_output_tokens == 4


def test_a_pattern_completed_among_drafts_cuts_the_drafts_behind_it():
    stage = Stage(num_speculative_tokens=3)
    drafted = request("a", 8, repetition=RepetitionLimits(1, 1, 3))
    stage.add(drafted)
    stage.update(stage.schedule(), {"a": [4]}, {"a": [4, 4, 9]})
    [output] = stage.update(stage.schedule(), {"a": [4, 4, 9, 10]})
    assert (output.new_token_ids, output.finish_reason) == ([4, 4], FinishReason.REPETITION)
    assert drafted.output_token_ids == [4, 4, 4]


def test_repetition_is_seen_in_the_first_tokens_of_a_continuation():
    stage = Stage()
    continued = request("a", 8, repetition=RepetitionLimits(1, 1, 3))
    continued.token_ids += [4, 4]
    stage.add(continued)
    [output] = stage.update(stage.schedule(), {"a": [4]})
    assert output.finish_reason is FinishReason.REPETITION


def test_every_token_that_ends_a_request_is_known_by_its_id():
    both = request("a", 8, stop_token_ids=[41, STOP])
    assert both.end_token_ids == {EOS, 41, STOP}
    assert request("a", 8, stop_token_ids=[41], ignore_eos=True).end_token_ids == {41}
