"""Runs one service as a child that cannot outlive its launcher.

`python -m launcher.child PARENT_PID SERVICE FLAGS`. A wrapper inside the child, because code between fork
and exec in a launcher that has threads is not safe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from launcher.services import main_of

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Tie this process to its parent, then become the service."""
    parent_pid, service, *arguments = argv
    die_with_parent(int(parent_pid))
    return main_of(service)(arguments)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies; exits at once if it is dead already. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit("the launcher is gone")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
