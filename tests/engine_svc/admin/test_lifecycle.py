"""The engine's state machine: its table, and its listeners."""

from __future__ import annotations

import itertools

import pytest

from engine_svc.admin.lifecycle import EngineState, Lifecycle
from engine_svc.core.errors import InvalidTransition

_PATHS: dict[EngineState, list[EngineState]] = {
    EngineState.LOADING: [],
    EngineState.READY: [EngineState.READY],
    EngineState.DRAINING: [EngineState.READY, EngineState.DRAINING],
    EngineState.STOPPED: [EngineState.STOPPED],
    EngineState.FAILED: [EngineState.FAILED],
}
_ALLOWED = {
    (EngineState.LOADING, EngineState.READY),
    (EngineState.LOADING, EngineState.STOPPED),
    (EngineState.LOADING, EngineState.FAILED),
    (EngineState.READY, EngineState.DRAINING),
    (EngineState.READY, EngineState.FAILED),
    (EngineState.DRAINING, EngineState.READY),
    (EngineState.DRAINING, EngineState.STOPPED),
    (EngineState.DRAINING, EngineState.FAILED),
}


@pytest.mark.parametrize(
    ("start", "end"), list(itertools.product(EngineState, EngineState)), ids=lambda state: state.value
)
def test_only_the_moves_of_the_table_are_possible(start, end):
    lifecycle = Lifecycle()
    for state in _PATHS[start]:
        lifecycle.move_to(state)
    if (start, end) in _ALLOWED:
        lifecycle.move_to(end)
        assert lifecycle.state is end
    else:
        with pytest.raises(InvalidTransition, match=start.value):
            lifecycle.move_to(end)
        assert lifecycle.state is start


def test_subscribers_hear_of_every_change_in_order():
    lifecycle, notified = Lifecycle(), []
    lifecycle.subscribe(lambda state: notified.append(("first", state)))
    lifecycle.subscribe(lambda state: notified.append(("second", state)))
    lifecycle.move_to(EngineState.READY)
    lifecycle.move_to(EngineState.DRAINING)
    assert notified == [
        ("first", EngineState.READY),
        ("second", EngineState.READY),
        ("first", EngineState.DRAINING),
        ("second", EngineState.DRAINING),
    ]
