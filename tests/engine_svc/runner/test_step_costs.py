"""Costs of a step by what its parts take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_svc.runner.step_costs import measure_costs


class Timer:
    """Parts that take as long as they are said to."""

    device = SimpleNamespace(type="cpu")
    drafting = SimpleNamespace(costs_time=False)

    def decode(self, num_rows: int, context_length: int) -> float:
        return 1.0 + 0.1 * num_rows + 1e-3 * num_rows * (context_length - 1)

    def draw(self, num_rows: int) -> float:
        return 0.01 * num_rows

    def host_of_drafts(self, num_rows: int) -> float:
        return 0.5 + 0.02 * num_rows


@pytest.mark.parametrize(("max_num_seqs", "per_step", "per_row"), [(64, 0.5, 0.02), (1, 0.52, 0.0)])
def test_the_host_of_drafts_is_divided_into_step_and_rows(max_num_seqs, per_step, per_row):
    costs = measure_costs(Timer(), 16, max_num_seqs, 512)
    assert costs.seconds_per_drafted_step == pytest.approx(per_step)
    assert costs.seconds_per_drafted_row == pytest.approx(per_row)
    assert costs.seconds_per_draw == pytest.approx(0.01)
    assert costs.of(16) == pytest.approx(2.6)
