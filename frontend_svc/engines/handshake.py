"""How a stream to an engine begins: who we are, what we understand, and whom we do not work with."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.engine.v1 import session_pb2

SCHEMA_REVISION = 1
# The oldest contract of an engine that this frontend works with.
MIN_ENGINE_REVISION = 1
# Behaviours that take part in a session only where both sides name them.
RESUME = "resume"
ADOPT = "adopt"
FEATURES = frozenset({RESUME, ADOPT})


@dataclass(frozen=True, slots=True)
class FrontendIdentity:
    """Who this frontend process is, as it tells engines and the coordinator."""

    frontend_id: str
    epoch: int


def make_hello(
    identity: FrontendIdentity, session_id: str, resume: session_pb2.ResumePoint | None
) -> session_pb2.Hello:
    """The first message to an engine; with `resume`, to go on with the session of that id."""
    return session_pb2.Hello(
        frontend_id=identity.frontend_id,
        session_id=session_id,
        frontend_epoch=identity.epoch,
        schema_revision=SCHEMA_REVISION,
        min_peer_revision=MIN_ENGINE_REVISION,
        features=sorted(FEATURES),
        role=session_pb2.PEER_ROLE_FRONTEND,
        resume=resume,
    )


def refusal(ack: session_pb2.HelloAck) -> str | None:
    """Why this frontend and the engine that answered `ack` cannot work together, or None."""
    revisions = f"engine has contract revision {ack.schema_revision}, this frontend {SCHEMA_REVISION}"
    if ack.min_peer_revision > SCHEMA_REVISION:
        return f"{revisions}: the engine needs {ack.min_peer_revision} or newer"
    if ack.schema_revision < MIN_ENGINE_REVISION:
        return f"{revisions}: the frontend needs {MIN_ENGINE_REVISION} or newer"
    return None
