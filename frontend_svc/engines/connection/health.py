"""States of an engine as this frontend uses it, and a hang detector for its steps. Pure."""

from __future__ import annotations

from collections import deque
from enum import Enum

from triptych.engine.v1 import session_pb2

# States that an engine reports while an operator pauses it: it accepts requests, and they wait there.
HELD_STATES = (session_pb2.ENGINE_STATE_PAUSED, session_pb2.ENGINE_STATE_ASLEEP)

_MIN_LIMIT_S = 5.0
# A step that takes so many times the 99th percentile of the latest steps hangs.
_MAX_RATIO = 10
_MAX_DURATIONS = 256


class EngineState(Enum):
    """What this frontend can do with an engine."""

    CONNECTING = "connecting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    RECONNECTING = "reconnecting"  # its stream broke; its requests may continue on another
    DOWN = "down"
    CLOSED = "closed"


# The engine serves, or did until a moment ago.
IN_USE_STATES = (EngineState.READY, EngineState.DRAINING, EngineState.RECONNECTING)

TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.CONNECTING: frozenset({EngineState.LOADING, EngineState.DOWN, EngineState.CLOSED}),
    EngineState.LOADING: frozenset(
        {EngineState.READY, EngineState.DRAINING, EngineState.DOWN, EngineState.CLOSED}
    ),
    EngineState.READY: frozenset(
        {EngineState.DRAINING, EngineState.RECONNECTING, EngineState.DOWN, EngineState.CLOSED}
    ),
    # Back to LOADING, and from there to READY, when a drain is cancelled.
    EngineState.DRAINING: frozenset(
        {EngineState.LOADING, EngineState.RECONNECTING, EngineState.DOWN, EngineState.CLOSED}
    ),
    EngineState.RECONNECTING: frozenset(
        {EngineState.READY, EngineState.DRAINING, EngineState.DOWN, EngineState.CLOSED}
    ),
    EngineState.DOWN: frozenset({EngineState.CONNECTING, EngineState.CLOSED}),
    EngineState.CLOSED: frozenset(),
}


class StepWatch:
    """Detects a hanging step from the engine's heartbeats and the durations of its latest steps."""

    def __init__(self) -> None:
        self.hung_step: int | None = None  # reset when the engine gets past it
        self.age_s = 0.0  # of the running step at the last heartbeat; 0 without one
        self._durations_s: deque[float] = deque(maxlen=_MAX_DURATIONS)
        self._step_number = 0
        self._stepped_at: float | None = None

    def on_step(self, step_number: int, now: float, *, has_more: bool) -> None:
        """Learn from a step. `has_more`: requests are left, so the engine starts the next step at once."""
        if self._stepped_at is not None and step_number > self._step_number:
            # Steps without a row for this frontend are not sent, and unread ones are merged into one.
            self._durations_s.append((now - self._stepped_at) / (step_number - self._step_number))
        self._step_number = step_number
        self._stepped_at = now if has_more else None

    def on_heartbeat(self, heartbeat: session_pb2.Heartbeat) -> float | None:
        """Returns the age of the running step if it is found to hang now; None also while it still hangs."""
        self.age_s = heartbeat.step_started_age_ms / 1000 if heartbeat.has_work else 0.0
        if self.hung_step is not None:
            if heartbeat.step_number > self.hung_step or not heartbeat.has_work:
                self.hung_step = None
            return None
        hung_for_s = self.hung_for_s(heartbeat)
        if hung_for_s is not None:
            self.hung_step = heartbeat.step_number
        return hung_for_s

    def hung_for_s(self, heartbeat: session_pb2.Heartbeat) -> float | None:
        """The age of the engine's running step if that is too long, else None."""
        age_s = heartbeat.step_started_age_ms / 1000
        if not heartbeat.has_work or age_s <= _MIN_LIMIT_S or age_s <= heartbeat.step_budget_ms / 1000:
            return None
        return age_s if age_s > self.limit_s() else None

    def reset(self) -> None:
        """Forget the durations: another engine process, or another stream."""
        self._durations_s.clear()
        self.age_s = 0.0
        self._stepped_at = None

    def limit_s(self) -> float:
        """How long a step may take if the engine has not announced a longer budget."""
        if not self._durations_s:
            return _MIN_LIMIT_S
        ordered = sorted(self._durations_s)
        return max(_MIN_LIMIT_S, _MAX_RATIO * ordered[(len(ordered) * 99) // 100])
