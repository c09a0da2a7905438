"""A bound on what a piece of work may allocate. Where the system does not count it, there is none."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

_STATISTICS = Path("/proc/self/statm")
_DATA_FIELD = 5


@contextlib.contextmanager
def extra_memory(num_bytes: int) -> Iterator[None]:
    """Let the process's data grow by `num_bytes` at most within the block; beyond, MemoryError is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + num_bytes
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    try:
        fields = _STATISTICS.read_text().split()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(fields[_DATA_FIELD]) * resource.getpagesize()
