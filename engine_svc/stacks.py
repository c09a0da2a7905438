"""Where all threads stand, of this process and of its ranks, on the standard error. Knows no step."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

_ASKED = signal.SIGUSR1
# A rank writes within a few milliseconds, or is stopped and never does.
_WAIT_S = 0.1
_MAX_WAIT_S = 0.6  # for all of them
_UNREAD_S = 0.2  # longer, where nobody reads


def write_when_asked() -> None:
    """From now on this process answers `write_stacks_of`, whatever its threads do and hold."""
    faulthandler.register(_ASKED, all_threads=True)


def write_stacks_of(process_ids: Sequence[int]) -> None:
    """Have each of these children, which all have called `write_when_asked`, write where it stands.

    Takes no second, also where nobody reads what is written.
    """
    asking = threading.Thread(target=_ask, args=(process_ids,), name="stacks", daemon=True)
    asking.start()
    asking.join(_MAX_WAIT_S + _UNREAD_S)


def write_stacks() -> None:
    """Write where the threads of this process stand."""
    # Not at once to stderr: no thread runs while it is written, and it may be that nobody reads.
    with open(os.memfd_create("triptych-stacks", os.MFD_CLOEXEC), "w+") as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        _print(stacks.read())


def _ask(process_ids: Sequence[int]) -> None:
    for rank, process_id in enumerate(process_ids):
        _print(f"Rank {rank} (process {process_id}):\n")
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, _ASKED)
        time.sleep(min(_WAIT_S, _MAX_WAIT_S / len(process_ids)))


def _print(text: str) -> None:
    # The process may have been started without it, or closed it.
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, end="", file=sys.__stderr__, flush=True)
