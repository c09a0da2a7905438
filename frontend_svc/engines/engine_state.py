"""What becomes of an engine as this frontend sees it: the states and the moves between them. Pure."""

from __future__ import annotations

from enum import Enum

from triptych.engine.v1 import session_pb2

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
