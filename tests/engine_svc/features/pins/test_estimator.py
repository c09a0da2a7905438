"""How long a pin should last, by the gaps there were and by what time and blocks are worth."""

from __future__ import annotations

import random

import pytest

from engine_svc.features.pins.estimator import (
    MAX_GAPS,
    MIN_SEEN,
    FixedTtl,
    LogNormalTtl,
    PinValue,
    StepSeconds,
    ToolGaps,
    UtilityTtl,
)

DEAR = PinValue(saved_s=10.0, cost_s=1.0)
FREE = PinValue(saved_s=10.0, cost_s=0.0)
WORTHLESS = PinValue(saved_s=0.01, cost_s=1.0)


def test_a_fixed_time_is_that_of_every_pin():
    assert FixedTtl(10.0).ttl_s([100.0], WORTHLESS) == 10.0


@pytest.mark.parametrize(
    ("gaps", "ttl_s"), [([], 10.0), ([1.0] * 4, 10.0), ([5.0] * 4, 0.0), ([0.0, 3.9], 10.0)]
)
def test_277_a_log_normal_time_is_none_where_the_median_is_above_the_threshold(
    gaps: list[float], ttl_s: float
):
    assert LogNormalTtl(10.0, 2.0).ttl_s(gaps, DEAR) == ttl_s


def test_gaps_that_were_often_seen_are_covered_as_far_as_they_are_worth_it():
    gaps = sorted([1.0] * 9 + [60.0])
    assert 1.0 < UtilityTtl().ttl_s(gaps, DEAR) < 2.0
    assert 60.0 < UtilityTtl().ttl_s(gaps, FREE) < 70.0
    assert UtilityTtl().ttl_s(gaps, WORTHLESS) == 0.0


def test_the_time_by_seen_gaps_is_the_best_of_all_times():
    rng = random.Random(5)
    for _ in range(50):
        gaps = sorted(rng.lognormvariate(0.5, 1.0) for _ in range(rng.randint(MIN_SEEN, 40)))
        value = PinValue(rng.uniform(0.0, 10.0), rng.uniform(0.0, 2.0))

        def gain(ttl_s: float, gaps: list[float] = gaps, value: PinValue = value) -> float:
            # The time is a little longer than the gap that it covers.
            covered = [gap_s for gap_s in gaps if gap_s * 1.1 + 0.05 <= ttl_s + 1e-9]
            num_others = len(gaps) + 1 - len(covered)
            cost_s = (sum(covered) + num_others * ttl_s) * value.cost_s
            return (len(covered) * value.saved_s - cost_s) / (len(gaps) + 1)

        best = max(gain(index * 0.01) for index in range(2000))
        assert gain(UtilityTtl().ttl_s(gaps, value)) >= best - 0.011 * value.cost_s - 1e-9


def test_few_gaps_are_taken_for_exponential_and_covered_to_the_tail_or_not_at_all():
    assert UtilityTtl().ttl_s([1.0, 3.0], DEAR) == pytest.approx(6.0)
    assert UtilityTtl().ttl_s([1.0, 3.0], WORTHLESS) == 0.0
    assert UtilityTtl().ttl_s([], DEAR) > 0.0


def test_the_gaps_of_a_tool_are_those_of_all_jobs():
    gaps = ToolGaps()
    for number in range(MIN_SEEN):
        gaps.add(f"job-{number}", "search", 1.0 + number)
    gaps.add("new", "shell", 9.0)
    assert gaps.expected("new", "search") == [1.0 + number for number in range(MIN_SEEN)]
    assert gaps.expected("new", "shell") == [9.0]
    assert gaps.expected("new", "unknown") == [9.0]
    assert gaps.expected("other", "") == ()


def test_the_newest_gaps_of_the_sources_used_last_are_kept():
    gaps = ToolGaps(max_sources=2)
    for number in range(MAX_GAPS + 5):
        gaps.add("a", "", float(number))
    assert gaps.expected("a", "") == [float(number) for number in range(5, MAX_GAPS + 5)]
    gaps.add("b", "", 1.0)
    gaps.add("a", "", 1.0)
    gaps.add("c", "", 1.0)
    assert gaps.expected("b", "") == ()
    assert len(gaps.expected("a", "")) == MAX_GAPS


def test_the_time_of_a_token_is_the_slope_over_steps_of_several_sizes():
    steps = StepSeconds()
    assert steps.per_token == 0.0
    for _ in range(20):
        steps.note(1, 1, 0.012)
        steps.note(500, 1, 0.51)
    assert steps.per_token == pytest.approx(0.498 / 499)


def test_steps_of_one_size_have_no_slope_and_count_as_a_whole():
    steps = StepSeconds()
    for _ in range(20):
        steps.note(10, 10, 0.5)
    assert steps.per_token == pytest.approx(0.05)


def test_a_further_row_saves_its_part_of_what_steps_cost_without_tokens():
    steps = StepSeconds()
    assert steps.saved_per_row == 0.0
    for _ in range(20):
        steps.note(4, 4, 0.02 + 0.004)
        steps.note(100, 1, 0.02 + 0.1)
    # 0.02 s of a step are shared by four rows, and by one.
    assert steps.saved_per_row == pytest.approx((0.02 / 4 + 0.02) / (0.024 + 0.12), rel=0.01)
