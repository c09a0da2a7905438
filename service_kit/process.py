"""What must be in the environment of a process before grpc is imported. Imports only the standard library."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Literal

Role = Literal["frontend", "engine", "coordinator", "client"]

_PR_SET_PDEATHSIG = 1

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


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the parent dies; exits at once if it is dead already. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(f"the parent process {parent_pid} is gone")
