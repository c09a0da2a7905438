"""How much memory this process holds, as tests compare it before and after."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_KIB_PER_MIB = 1024


def resident_mib() -> float:
    """Of memory that it got itself, in MiB: pages of files are dropped by the system when it likes."""
    # Garbage of other tests must not be freed between two readings.
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / _KIB_PER_MIB


def return_heap() -> None:
    """Give freed memory of the C library's heap back: what a test allocates next would otherwise reuse it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
