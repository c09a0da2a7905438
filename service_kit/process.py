"""What a process is before it is a service: its environment, its title, whom it ends with.

Imports only the standard library at its own import, because grpc reads the environment when it is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    import asyncio.subprocess

Role = Literal["frontend", "engine", "coordinator", "client"]

_PR_SET_PDEATHSIG = 1
_INIT_PID = 1

# Event-engine listeners cost an engine's stream a third of its speed, but help a frontend's server side.
_EXPERIMENTS_OFF: dict[str, str] = {
    "engine": "-event_engine_client,-event_engine_listener,-event_engine_dns",
    "coordinator": "-event_engine_client,-event_engine_listener,-event_engine_dns",
    "frontend": "-event_engine_client",
    "client": "-event_engine_client",
}


def prepare_process(role: Role) -> None:
    """Set what grpc reads at its import. Call first thing in `main`; what the user has set stays.

    From here on SIGTERM ends a service, even as the first process of a container, until it says otherwise.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS_OFF[role])
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if os.getpid() == _INIT_PID and role != "client":
        # The kernel keeps from it what it does not handle, so that whoever stops the container while this
        # imports, or downloads a model, would wait for the whole grace period. A client has work that an
        # interruption leaves undone, and says so itself.
        end_at_once_on_signals(0)


def set_title(service: str, index: int | None = None, *parts: str | int) -> None:
    """Let `ps` show this process as, say, `triptych-engine-0-rank-1` instead of its command line.

    Without an index it is the only one of its kind, or the first.
    """
    # Here and not above: what prepares the environment must not wait for a package.
    import setproctitle

    words = ("triptych", service, *([] if index is None else [index]), *parts)
    setproctitle.setproctitle("-".join(map(str, words)))


def end_at_once_on_signals(exit_code: int) -> None:
    """From now on SIGTERM and SIGINT end this process without delay, with `exit_code`.

    For the time before the work, and after it, when there is nothing left that could be lost: whoever signals
    a second time does not want to wait for the rest.
    """

    def end(number: int, frame: object) -> NoReturn:
        os._exit(exit_code)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def leave_process(exit_code: int) -> NoReturn:
    """End this process with all that it has written, and without taking its interpreter apart."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Whoever read it may be gone.
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(exit_code)


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, for who starts others. Options are read through `load_config`."""
    return dict(os.environ)


def signal_name(number: int) -> str:
    """What people call a signal. Those for real time have no names, but the first and the last of them."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_child(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send `number` to a child that was started by asyncio, if it still runs.

    asyncio's own ways look first whether the child has ended, and thereby take the exit code of one that ends
    at this moment from whoever waits for it, who is told 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent dies; exits at once if that is gone already. Linux.

    Killed, not asked to end: a service that drained on its own would keep its port, and its device, from
    whoever takes the parent's place.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(f"the parent process {parent_pid} is gone")


def leave_process_group() -> None:
    """Let Ctrl-C in a terminal reach whoever started this process, and not this process as well.

    Not by a session of its own: Linux shares the cores out among sessions first, and of a few services on two
    busy cores one with several threads was kept waiting for up to 3 s.
    """
    # Who leads a group or a session is in no other's.
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
