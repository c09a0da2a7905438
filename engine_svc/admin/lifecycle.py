"""State machine of the whole engine: loading, ready, draining, stopped, failed. Owned by the event loop."""

from __future__ import annotations

import enum
from collections.abc import Callable

from engine_svc.core.errors import InvalidTransition


class EngineState(enum.Enum):
    """The life of one engine process."""

    LOADING = "loading"  # every ADD is refused
    READY = "ready"
    DRAINING = "draining"  # running requests are finished, new ones refused
    STOPPED = "stopped"
    FAILED = "failed"  # the loop or the loading raised: the process ends with an error


_TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.LOADING: frozenset({EngineState.READY, EngineState.STOPPED, EngineState.FAILED}),
    EngineState.READY: frozenset({EngineState.DRAINING, EngineState.FAILED}),
    # Back to READY if it drained to leave a group and that was cancelled.
    EngineState.DRAINING: frozenset({EngineState.READY, EngineState.STOPPED, EngineState.FAILED}),
    EngineState.STOPPED: frozenset(),
    EngineState.FAILED: frozenset(),
}


class Lifecycle:
    """The engine's state, and the listeners for its changes, in order of subscription."""

    def __init__(self) -> None:
        self._state = EngineState.LOADING
        self._listeners: list[Callable[[EngineState], None]] = []

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def has_ended(self) -> bool:
        """Whether no further step will run."""
        return self._state in (EngineState.STOPPED, EngineState.FAILED)

    def subscribe(self, listener: Callable[[EngineState], None]) -> None:
        """Call `listener` with each state entered from now on."""
        self._listeners.append(listener)

    def repeat(self) -> None:
        """Notify the listeners of the present state again: facts announced with it have changed."""
        for listener in self._listeners:
            listener(self._state)

    def move_to(self, state: EngineState) -> None:
        """Enter `state` and notify the listeners; raises InvalidTransition for a move not in the table."""
        if state not in _TRANSITIONS[self._state]:
            raise InvalidTransition(f"an engine that is {self._state.value} cannot become {state.value}")
        self._state = state
        for listener in self._listeners:
            listener(state)
