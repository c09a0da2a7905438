"""Whether an engine's loop hangs, by its heartbeats and by how long its steps usually take. Pure."""

from __future__ import annotations

from collections import deque
from enum import Enum

from triptych.engine.v1 import session_pb2

_MIN_LIMIT_S = 5.0
_USUAL_STEPS = 10  # so many times as long as nearly all steps take, no step takes
_MAX_DURATIONS = 256


class StepWatch:
    """Durations of an engine's latest steps, and what they say of the one that runs."""

    def __init__(self) -> None:
        self.hung_step: int | None = None  # until the engine gets beyond it
        self.age_s = 0.0  # of the step that ran when the engine was heard last; 0 where none did
        self._durations_s: deque[float] = deque(maxlen=_MAX_DURATIONS)
        self._step_number = 0
        self._stepped_at: float | None = None

    def on_step(self, step_number: int, now: float, *, has_more: bool) -> None:
        """A step has come. `has_more` tells that requests are left, so that the next one begins at once."""
        if self._stepped_at is not None and step_number > self._step_number:
            # Steps without a row for this frontend are not told, and unread ones come as one.
            self._durations_s.append((now - self._stepped_at) / (step_number - self._step_number))
        self._step_number = step_number
        self._stepped_at = now if has_more else None

    def limit_s(self) -> float:
        """How long a step may take that nobody has announced to be long."""
        if not self._durations_s:
            return _MIN_LIMIT_S
        ordered = sorted(self._durations_s)
        return max(_MIN_LIMIT_S, _USUAL_STEPS * ordered[(len(ordered) * 99) // 100])

    def observe(self, heartbeat: session_pb2.Heartbeat) -> float | None:
        """For how long a step has been running that is seen to hang now; None where none does, or still."""
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
        """For how long the engine's step has been running where that is too long, else None."""
        age_s = heartbeat.step_started_age_ms / 1000
        if not heartbeat.has_work or age_s <= _MIN_LIMIT_S or age_s <= heartbeat.step_budget_ms / 1000:
            return None
        return age_s if age_s > self.limit_s() else None

    def forget(self) -> None:
        """Another engine process, or another stream: nothing is known of what it does."""
        self._durations_s.clear()
        self.age_s = 0.0
        self._stepped_at = None


# What an engine says of itself while an operator holds it: it takes requests, and they wait there.
HELD_STATES = (session_pb2.ENGINE_STATE_PAUSED, session_pb2.ENGINE_STATE_ASLEEP)


class EngineState(Enum):
    """What this frontend can do with an engine."""

    CONNECTING = "connecting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    RECONNECTING = "reconnecting"  # its stream broke; its requests may go on over another
    DOWN = "down"
    CLOSED = "closed"


# It serves, or did until a moment ago.
IN_USE_STATES = (EngineState.READY, EngineState.DRAINING, EngineState.RECONNECTING)

TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.CONNECTING: frozenset({EngineState.LOADING, EngineState.DOWN, EngineState.CLOSED}),
    EngineState.LOADING: frozenset(
        {EngineState.READY, EngineState.DRAINING, EngineState.DOWN, EngineState.CLOSED}
    ),
    EngineState.READY: frozenset(
        {EngineState.DRAINING, EngineState.RECONNECTING, EngineState.DOWN, EngineState.CLOSED}
    ),
    # Back to LOADING, and from there to READY, where it was to leave, and that was taken back.
    EngineState.DRAINING: frozenset(
        {EngineState.LOADING, EngineState.RECONNECTING, EngineState.DOWN, EngineState.CLOSED}
    ),
    EngineState.RECONNECTING: frozenset(
        {EngineState.READY, EngineState.DRAINING, EngineState.DOWN, EngineState.CLOSED}
    ),
    EngineState.DOWN: frozenset({EngineState.CONNECTING, EngineState.CLOSED}),
    EngineState.CLOSED: frozenset(),
}
