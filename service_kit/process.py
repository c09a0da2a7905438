"""What must be in the environment of a process before grpc is imported. Imports only the standard library."""

from __future__ import annotations

import os
from typing import Literal

Role = Literal["frontend", "engine", "coordinator", "client"]

# Event-engine listeners cost an engine's stream a third of its speed, but help a frontend's server side.
_EXPERIMENTS_OFF: dict[str, str] = {
    "engine": "-event_engine_client,-event_engine_listener,-event_engine_dns",
    "coordinator": "-event_engine_client,-event_engine_listener,-event_engine_dns",
    "frontend": "-event_engine_client",
    "client": "-event_engine_client",
}


def prepare_process(role: Role) -> None:
    """Set what grpc reads at its import. Call first thing in `main`; what the user has set stays."""
    os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS_OFF[role])
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, for who starts others. Options are read through `load_config`."""
    return dict(os.environ)
