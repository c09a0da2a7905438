"""Which thinking budgets an ADD may ask for, and what becomes of them."""

from __future__ import annotations

import pytest

from engine_svc.features.thinking_budget.extras import ThinkingBudget
from tests.engine_svc.session.service_rig import make_entry, read_add
from triptych.engine.v1 import add_pb2
from triptych_kit.errors import InvalidArgument


def thinking_entry(budget: int, start: list[int], end: list[int]) -> add_pb2.AddEntry:
    entry = make_entry(1, thinking_token_budget=budget)
    entry.reasoning_options.start_token_ids.extend(start)
    entry.reasoning_options.end_token_ids.extend(end)
    return entry


def test_127_a_thinking_budget_comes_with_its_markers_and_minus_one_is_none():
    assert read_add(thinking_entry(5, [7], [8, 9])).extras == {
        ThinkingBudget: ThinkingBudget(5, (7,), (8, 9))
    }
    assert read_add(thinking_entry(-1, [7], [8])).extras == {}
    assert read_add(make_entry(1)).extras == {}


@pytest.mark.parametrize(
    ("budget", "start", "end", "shown"),
    [
        (-2, [7], [8], "thinking_token_budget is -2"),
        (5, [], [8], "start_token_ids is 0, it takes at least 1"),
        (5, [7], [8] * 17, "end_token_ids has 17"),
        (5, [10**6], [8], r"start_token_ids\[0\] is 1000000, must be below"),
    ],
)
def test_127_a_thinking_budget_that_cannot_be_kept_is_refused(budget, start, end, shown):
    with pytest.raises(InvalidArgument, match=shown):
        read_add(thinking_entry(budget, start, end))
