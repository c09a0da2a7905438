"""How many connections there are to a port, where none may wait for a collection to be closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

_ESTABLISHED = "01"  # of the state column
_LIMIT_S = 60.0


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """What only a collection would free stays: in a process that does little, that may be for ever."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def until_connections(address: str, num_connections: int) -> None:
    """Wait until so many TCP connections to a loopback port stand. TimeoutError if they never do."""
    async with asyncio.timeout(_LIMIT_S):
        # The kernel has no event for it.
        while _num_connections(address) != num_connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _num_connections(address: str) -> int:
    port = int(address.rpartition(":")[2])
    rows = [
        line.split()
        for family in ("tcp", "tcp6")
        for line in Path("/proc/net", family).read_text().splitlines()[1:]
    ]
    return sum(row[3] == _ESTABLISHED and int(row[2].rpartition(":")[2], 16) == port for row in rows)
