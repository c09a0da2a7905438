"""What is kept for the frontend that adopts a request."""

from __future__ import annotations

from array import array
from math import isnan
from typing import Any

import pytest

from engine_svc.convert import messages
from engine_svc.core.request import FinishReason, Request, RequestOutput
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import PromptPlaces, TokenLogprobs
from engine_svc.loop.output_router import KeptRequests
from engine_svc.loop.step_output import FinishedRow, StepOutput, Told, UnreadSteps


class Kept:
    """One kept request, stepped by hand."""

    def __init__(self, *, outputs_before: list[int] | None = None, **wishes: Any) -> None:
        prompt = [1, 2, 3]
        sampling = SamplingParams(max_tokens=64, **wishes)
        self.request = Request("r", prompt + (outputs_before or []), 3, sampling)
        self.requests = KeptRequests()
        self.requests.keep(self.request)

    def step(
        self, token_ids: list[int], reason: FinishReason | None = None, *, cached: int | None = None
    ) -> None:
        self.request.token_ids += token_ids
        output = RequestOutput("r", token_ids, reason, num_cached_tokens=cached)
        self.requests.note([RequestOutput("other", [9]), output])

    def row(self, handle: int = 7) -> StepOutput:
        return self.requests.row("r", handle, step_number=5)


def test_all_that_came_is_one_row_which_remembers_its_steps():
    kept = Kept()
    kept.step([10], cached=2)
    kept.step([11, 12])
    kept.step([13], FinishReason.LENGTH)
    row = kept.row()
    assert (row.handles, row.num_tokens, row.token_ids) == ([7], [4], [10, 11, 12, 13])
    assert (row.parts, row.first) == ([(0, [1, 2, 1])], [(0, 2)])
    assert row.finished == [FinishedRow(0, FinishReason.LENGTH)]


def test_tokens_of_an_engine_before_are_there_too():
    kept = Kept(outputs_before=[20, 21])
    kept.step([22])
    row = kept.row()
    assert (row.token_ids, row.parts, row.finished) == ([20, 21, 22], [(0, [2, 1])], [])


def test_what_was_told_goes_to_the_newest_tokens():
    kept = Kept(outputs_before=[20])
    kept.step([21])
    kept.requests.note_told("r", Told({3: TokenLogprobs([-1.0], [2], 1, [5], [-0.5])}), handle=3)
    kept.step([22])
    later = TokenLogprobs([-2.0], [1], 1, [6], [-2.0])
    kept.requests.note_told("r", Told({3: later}, {3: [PromptPlaces(1, later)]}), handle=3)
    told = kept.row(handle=8).told
    assert told is not None
    sampled = told.sampled[8]
    assert isnan(sampled.logprobs[0]) and isnan(sampled.top_logprobs[0])
    assert (sampled.logprobs[1:], sampled.ranks, sampled.top_token_ids) == (
        [-1.0, -2.0],
        [0, 2, 1],
        [0, 5, 6],
    )
    assert told.prompts == {8: [PromptPlaces(1, later)]}


def test_tokens_of_an_engine_before_have_their_places_before_anything_was_told():
    adopted, later = Kept(outputs_before=[20, 21], logprobs=2).row(), StepOutput(6, [7], [1], [22])
    assert adopted.told is not None
    assert [isnan(value) for value in adopted.told.sampled[7].logprobs] == [True, True]
    later.tell(Told({7: TokenLogprobs([-1.0], [2], 2, [5, 6], [-0.5, -2.0])}))
    unread = UnreadSteps()
    unread.add(adopted)
    unread.add(later)
    step = messages.to_step(unread.merged(), {})
    assert [isnan(value) for value in array("f", step.sampled_logprobs)] == [True, True, False]
    assert step.top_logprobs.k == 2
    assert array("I", step.top_logprobs.token_ids).tolist() == [0] * 4 + [5, 6]
    assert [isnan(value) for value in array("f", step.top_logprobs.logprobs)] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("wishes", "k"),
    [({}, None), ({"logprobs": 0}, 0), ({"logprobs": 3}, 1), ({"logprob_token_ids": (4,)}, 1)],
)
def test_places_have_others_beside_them_where_the_request_asked_for_others(wishes, k):
    told = Kept(outputs_before=[20], **wishes).row().told
    assert (None if told is None else told.sampled[7].k) == k


def test_where_nothing_was_yielded_there_is_nothing_to_tell():
    assert Kept(logprobs=1).row().told is None


def test_what_is_kept_does_not_grow_with_what_was_given_away():
    kept = Kept()
    kept.step([10])
    kept.requests.note_told("r", Told({3: TokenLogprobs([-1.0], [1])}), handle=3)
    first = kept.row()
    kept.step([11])
    kept.requests.note_told("r", Told({3: TokenLogprobs([-2.0], [1])}), handle=3)
    assert first.told is not None and first.told.sampled[7].logprobs == [-1.0]
    assert first.token_ids == [10]


def test_a_forgotten_request_is_gone_and_others_never_were():
    kept = Kept()
    kept.requests.forget("r")
    kept.requests.forget("r")
    kept.step([10])
    kept.requests.note_told("r", Told({3: TokenLogprobs([-1.0], [1])}), handle=3)
    assert "r" not in kept.requests and len(kept.requests) == 0
    with pytest.raises(KeyError):
        kept.row()
