"""Budgets and limits among the sampling parameters of an ADD, that depend on the engine or come with more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_svc.convert import messages
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import ThinkingBudget
from service_kit.errors import InvalidArgument
from tests.engine_svc.session.service_rig import make_entry, make_facts
from triptych.engine.v1 import add_pb2


def to_request(entry: add_pb2.AddEntry, **facts: int) -> Request:
    return messages.to_request(entry, session_number=1, facts=replace(make_facts(), **facts), now=0.0)


def test_an_engine_tells_as_many_logprobs_as_it_is_configured_to():
    for wish in ("logprobs", "prompt_logprobs"):
        asked = make_entry(1, **{wish: 25})
        with pytest.raises(InvalidArgument, match=f"{wish} is 25, it takes 0 to 20"):
            to_request(asked)
        assert getattr(to_request(asked, max_logprobs=25).sampling, wish) == 25
        everything = make_entry(1, **{wish: -1})
        assert getattr(to_request(everything, max_logprobs=-1).sampling, wish) == -1
        with pytest.raises(InvalidArgument, match=f"{wish} is -2, it takes -1 to"):
            to_request(make_entry(1, **{wish: -2}), max_logprobs=-1)


def thinking_entry(budget: int, start: list[int], end: list[int]) -> add_pb2.AddEntry:
    entry = make_entry(1, thinking_token_budget=budget)
    entry.reasoning_options.start_token_ids.extend(start)
    entry.reasoning_options.end_token_ids.extend(end)
    return entry


def test_127_a_thinking_budget_comes_with_its_markers_and_minus_one_is_none():
    assert to_request(thinking_entry(5, [7], [8, 9])).sampling.thinking == ThinkingBudget(5, (7,), (8, 9))
    assert to_request(thinking_entry(-1, [7], [8])).sampling.thinking is None
    assert to_request(make_entry(1)).sampling.thinking is None


@pytest.mark.parametrize(
    ("budget", "start", "end", "shown"),
    [
        (-2, [7], [8], "thinking_token_budget is -2"),
        (5, [], [8], "start_token_ids is 0, it takes 1 to 16"),
        (5, [7], [8] * 17, "end_token_ids is 17"),
        (5, [10**6], [8], "start_token_ids is 1000000, it takes below"),
    ],
)
def test_127_a_thinking_budget_that_cannot_be_kept_is_refused(budget, start, end, shown):
    with pytest.raises(InvalidArgument, match=shown):
        to_request(thinking_entry(budget, start, end))
