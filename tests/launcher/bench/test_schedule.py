"""When requests are due."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from launcher.bench.serve import arrival_offsets

NUM = 20_000


def gaps_of(burstiness: float, rate: float = 50.0) -> list[float]:
    return [later - earlier for earlier, later in pairwise(arrival_offsets(NUM, rate, burstiness, seed=3))]


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_offsets(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]


def test_the_first_is_due_at_once_and_none_before_another() -> None:
    offsets = arrival_offsets(100, 10.0, 0.3, seed=1)
    assert offsets[0] == 0.0
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    gaps = gaps_of(burstiness)
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    # The coefficient of variation of a gamma distribution is one over the root of its shape.
    spread = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_a_poisson_process_has_exponential_gaps() -> None:
    gaps = gaps_of(1.0)
    for share in (0.1, 0.5, 0.9):
        bound = -math.log(1 - share) / 50
        assert sum(gap <= bound for gap in gaps) / len(gaps) == pytest.approx(share, abs=0.02)


def test_the_seed_decides() -> None:
    assert arrival_offsets(5, 1.0, 1.0, seed=1) == arrival_offsets(5, 1.0, 1.0, seed=1)
    assert arrival_offsets(5, 1.0, 1.0, seed=1) != arrival_offsets(5, 1.0, 1.0, seed=2)
