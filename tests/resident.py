"""How much memory a process holds, as tests compare it before and after."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

_KIB_PER_MIB = 1024


def resident_mib() -> float:
    """Of memory that it got itself, in MiB: pages of files are dropped by the system when it likes.

    Without what the C library's heap holds free: an allocation may lie in a gap of it that earlier tests
    left, and its pages then stay with the process when it is freed, whatever its size.
    """
    # Garbage of other tests must not be freed between two readings.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous_mib(os.getpid())


def anonymous_mib(pid: int) -> float:
    """Memory in use that a process got itself, in MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / _KIB_PER_MIB
