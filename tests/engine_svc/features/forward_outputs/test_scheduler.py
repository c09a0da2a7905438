"""What goes out of a step's positions: those that are new, and none of a rejected draft."""

from __future__ import annotations

import pytest

from engine_svc.features.forward_outputs.extras import ForwardOutputs, PositionRun
from engine_svc.features.forward_outputs.scheduler import rest


def outputs(first: int, num: int) -> ForwardOutputs:
    """Each position's state is its number."""
    return ForwardOutputs((PositionRun(first, num, bytes(range(first, first + num))),))


@pytest.mark.parametrize(
    ("position", "num_rejected", "left"),
    [(0, 0, (4, 5)), (4, 0, (4, 5)), (6, 0, (6, 3)), (9, 0, None), (4, 2, (4, 3)), (7, 2, None)],
)
def test_the_new_positions_are_left(position: int, num_rejected: int, left: tuple[int, int] | None):
    expected = None if left is None else (outputs(*left), sum(left))
    assert rest(outputs(4, 5), position, num_rejected) == expected
