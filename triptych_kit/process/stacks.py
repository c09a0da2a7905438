"""Stack dumps of all threads of this process and of its ranks, on stderr."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

_ASKED = signal.SIGUSR1
# A rank writes within a few milliseconds, or is stopped and never does.
_WAIT_S = 0.1
_MAX_WAIT_S = 0.6  # for all of them


def write_when_asked() -> None:
    """Write the stacks of all threads to stderr on SIGUSR1, whatever the threads do or hold."""
    if sys.__stderr__ is None:
        # The signal must not end the process for that.
        signal.signal(_ASKED, signal.SIG_IGN)
    else:
        faulthandler.register(_ASKED, file=sys.__stderr__, all_threads=True)


def write_stacks_of(process_ids: Sequence[int]) -> None:
    """Have each of these child processes write its stacks.

    The signal terminates a process that has not called `write_when_asked`.
    """
    for rank, process_id in enumerate(process_ids):
        _print(f"Rank {rank} (process {process_id}):\n")
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, _ASKED)
        time.sleep(min(_WAIT_S, _MAX_WAIT_S / len(process_ids)))


def write_stacks() -> None:
    """Write the stacks of all threads of this process."""
    # Not directly to stderr: no thread runs while faulthandler writes, and a pipe may have no reader.
    with open(os.memfd_create("triptych-stacks", os.MFD_CLOEXEC), "w+") as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        _print(stacks.read())


def write_beside(write: Callable[[], None], limit_s: float) -> None:
    """Call `write` in a thread and return after `limit_s` at the latest: a write to an unread pipe blocks."""
    writing = threading.Thread(target=write, name="writing", daemon=True)
    writing.start()
    writing.join(limit_s)


def _print(text: str) -> None:
    # The process may have been started without stderr, or closed it.
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, end="", file=sys.__stderr__, flush=True)
