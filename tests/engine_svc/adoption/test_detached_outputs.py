"""What a session that adopts a request gets: all outputs of the request so far, as one row."""

from __future__ import annotations

from array import array
from math import isnan
from typing import Any

import pytest

from engine_svc.convert import messages
from engine_svc.core.extras import Extras
from engine_svc.core.request import FinishReason, FirstOutput, Request, RequestOutput
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import TokenLogprobs
from engine_svc.features.prompt_logprobs.extras import PromptLogprobs, PromptRun
from engine_svc.loop.mailbox import Add, Adopt, Outbox
from engine_svc.loop.output_router import OutputRouter
from engine_svc.loop.step_output import FinishedRow, LogprobDeltas, StepOutput, UnreadSteps
from tests.engine_svc.request_options import make_wire_features


class DetachedRequest:
    """One kept request, whose outputs go to a session and then, adopted, to another."""

    def __init__(self, *, outputs_before: list[int] | None = None, **options: Any) -> None:
        prompt = [1, 2, 3]
        sampling = SamplingParams(max_tokens=64, **options)
        self.request = Request("r", prompt + (outputs_before or []), 3, sampling)
        self.router = OutputRouter()
        self.first, self.second = (Outbox(max_bytes=1_000_000, wake=lambda: None) for _ in range(2))
        self.router.begin(Add(self.request, self.first, 3, keeps_outputs=True))

    def step(
        self,
        token_ids: list[int],
        reason: FinishReason | None = None,
        *,
        cached: int | None = None,
        extras: Extras | None = None,
        sampled: TokenLogprobs | None = None,
    ) -> None:
        self.request.token_ids += token_ids
        output = RequestOutput(
            "r", token_ids, reason, first=None if cached is None else FirstOutput(cached), extras=extras or {}
        )
        self.router.by_id["other"] = (self.first, 4)
        logprobs = {"other": TokenLogprobs([-9.0], [9])} | ({} if sampled is None else {"r": sampled})
        self.router.rows([RequestOutput("other", [9]), output], logprobs, step_number=4)

    def row(self, handle: int = 7) -> StepOutput:
        return self.router.adopt(Adopt("r", self.second, handle), step_number=5)[self.second]


def test_all_that_came_is_one_row_which_remembers_its_steps():
    detached = DetachedRequest()
    detached.step([10], cached=2)
    detached.step([11, 12])
    detached.step([13], FinishReason.LENGTH)
    row = detached.row()
    assert (row.handles, row.num_tokens, row.token_ids) == ([7], [4], [10, 11, 12, 13])
    assert (row.parts, row.first) == ([(0, [1, 2, 1])], [(0, FirstOutput(2))])
    assert row.finished == [FinishedRow(0, FinishReason.LENGTH)]


def test_tokens_of_an_engine_before_are_there_too():
    detached = DetachedRequest(outputs_before=[20, 21])
    detached.step([22])
    row = detached.row()
    assert (row.token_ids, row.parts, row.finished) == ([20, 21, 22], [(0, [2, 1])], [])


def test_logprobs_belong_to_the_newest_tokens():
    detached = DetachedRequest(outputs_before=[20])
    detached.step([21], sampled=TokenLogprobs([-1.0], [2], 1, [5], [-0.5]))
    # A stop has cut the second token of this step.
    detached.step([22], sampled=TokenLogprobs([-2.0, -3.0], [1, 1], 1, [6, 7], [-2.0, -3.0]))
    token_logprobs = detached.row(handle=8).token_logprobs
    assert token_logprobs is not None
    sampled = token_logprobs.sampled[8]
    assert isnan(sampled.logprobs[0]) and isnan(sampled.top_logprobs[0])
    assert (sampled.logprobs[1:], sampled.ranks, sampled.top_token_ids) == (
        [-1.0, -2.0],
        [0, 2, 1],
        [0, 5, 6],
    )


def test_extras_of_all_steps_are_kept_as_one():
    detached = DetachedRequest()
    runs = [PromptRun(1, TokenLogprobs([-1.0], [2])), PromptRun(2, TokenLogprobs([-2.0], [1]))]
    for run in runs:
        detached.step([], extras={PromptLogprobs: PromptLogprobs((run,))})
    detached.step([20])
    assert detached.row(handle=8).extras == {8: {PromptLogprobs: PromptLogprobs(tuple(runs))}}


def test_tokens_of_an_earlier_engine_have_their_positions_before_any_logprobs():
    adopted, later = DetachedRequest(outputs_before=[20, 21], logprobs=2).row(), StepOutput(6, [7], [1], [22])
    assert adopted.token_logprobs is not None
    assert [isnan(value) for value in adopted.token_logprobs.sampled[7].logprobs] == [True, True]
    later.add_logprobs(LogprobDeltas({7: TokenLogprobs([-1.0], [2], 2, [5, 6], [-0.5, -2.0])}))
    unread = UnreadSteps()
    unread.add(adopted)
    unread.add(later)
    step = messages.to_step(unread.merged(), {}, make_wire_features(), 0.0)
    assert [isnan(value) for value in array("f", step.sampled_logprobs)] == [True, True, False]
    assert step.top_logprobs.k == 2
    assert array("I", step.top_logprobs.token_ids).tolist() == [0] * 4 + [5, 6]
    assert [isnan(value) for value in array("f", step.top_logprobs.logprobs)] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("options", "k"),
    [({}, None), ({"logprobs": 0}, 0), ({"logprobs": 3}, 1), ({"logprob_token_ids": (4,)}, 1)],
)
def test_places_have_others_beside_them_where_the_request_asked_for_others(options, k):
    token_logprobs = DetachedRequest(outputs_before=[20], **options).row().token_logprobs
    assert (None if token_logprobs is None else token_logprobs.sampled[7].k) == k


def test_where_nothing_was_yielded_there_is_nothing_to_tell():
    assert DetachedRequest(logprobs=1).row().token_logprobs is None


def test_what_is_kept_does_not_grow_with_what_was_given_away():
    detached = DetachedRequest()
    detached.step([10], sampled=TokenLogprobs([-1.0], [1]))
    first = detached.row()
    detached.step([11], sampled=TokenLogprobs([-2.0], [1]))
    assert first.token_logprobs is not None and first.token_logprobs.sampled[7].logprobs == [-1.0]
    assert first.token_ids == [10]


def test_who_adopts_a_forgotten_request_gets_an_aborted_one():
    detached = DetachedRequest()
    for _ in range(2):
        detached.router.forget("r")
    detached.step([10], sampled=TokenLogprobs([-1.0], [1]))
    row = detached.row()
    assert (row.handles, row.token_ids, row.token_logprobs) == ([7], [], None)
    assert row.finished == [FinishedRow(0, FinishReason.ABORT)]
