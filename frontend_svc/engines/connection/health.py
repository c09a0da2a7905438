"""States of an engine as this frontend uses it, and whether its running step hangs. Pure."""

from __future__ import annotations

from enum import Enum

from triptych.engine.v1 import session_pb2

# States that an engine reports while an operator pauses it: it accepts requests, and they wait there.
HELD_STATES = (session_pb2.ENGINE_STATE_PAUSED, session_pb2.ENGINE_STATE_ASLEEP)

# For an engine that announces none.
_DEFAULT_BUDGET_S = 5.0
# Of a step, at most; calls that change an engine are announced with more.
_MAX_STEP_BUDGET_S = 60.0


class EngineState(Enum):
    """The state of an engine for this frontend."""

    CONNECTING = "connecting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    RECONNECTING = "reconnecting"  # its stream broke; its requests may continue on another
    DOWN = "down"
    CLOSED = "closed"


# The engine serves, or did until a moment ago.
IN_USE_STATES = (EngineState.READY, EngineState.DRAINING, EngineState.RECONNECTING)


class StepWatch:
    """Compares the age of the engine's running step with the budget that the engine announces."""

    def __init__(self) -> None:
        self.hung_step: int | None = None  # reset when the engine gets past it
        self.age_s = 0.0  # of the running step at the last heartbeat; 0 without one
        self.budget_s = _DEFAULT_BUDGET_S  # of a step, as it was announced last
        self.num_heartbeats = 0

    def on_heartbeat(self, heartbeat: session_pb2.Heartbeat) -> float | None:
        """Returns the age of the running step if it is found to hang now; None also while it still hangs."""
        self.num_heartbeats += 1
        self.age_s = heartbeat.step_started_age_ms / 1000 if heartbeat.has_work else 0.0
        budget_s = heartbeat.step_budget_ms / 1000 or _DEFAULT_BUDGET_S
        self.budget_s = min(budget_s, _MAX_STEP_BUDGET_S)
        if self.hung_step is not None:
            if heartbeat.step_number > self.hung_step or not heartbeat.has_work:
                self.hung_step = None
            return None
        if self.age_s <= budget_s:
            return None
        self.hung_step = heartbeat.step_number
        return self.age_s

    def reset(self) -> None:
        """No step is known to run: another engine process, or another stream."""
        self.age_s = 0.0
