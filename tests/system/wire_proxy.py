"""A TCP proxy that breaks connections after so many bytes, or lets nothing through for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from benchmarks.rig.processes import LOOPBACK
from triptych_conformance.wire import Wire
from triptych_kit.addresses import join_address


class WireProxy(Wire):
    """Between a client and `target`, host:port. `next_cut` says after how many bytes down each breaks."""

    def __init__(self, target: str, *, next_cut: Callable[[], int | None] = lambda: None) -> None:
        super().__init__(join_address(LOOPBACK, 0), target)
        self.num_cuts = 0  # by `cut_after`
        self.address = ""
        self._num_bytes_left: dict[bool, int | None] = {True: None, False: None}  # until such a cut, by is_up
        self._next_cut = next_cut
        self._cuts: dict[asyncio.StreamWriter, int | None] = {}  # bytes until a connection's own cut

    @property
    def num_open(self) -> int:
        return len(self._connections)

    def cut_after(self, num_bytes: int | None, *, is_up: bool) -> None:
        """Break the connection when more bytes than these are sent to the target or from it; None: do not."""
        self._num_bytes_left[is_up] = num_bytes

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool) -> None:
        self._cuts[writer] = None if is_up else self._next_cut()
        try:
            await super()._pump(reader, writer, is_up=is_up)
        finally:
            del self._cuts[writer]

    def _passed(self, data: bytes, writer: asyncio.StreamWriter, *, is_up: bool) -> bytes:
        if (limit := self._num_bytes_left[is_up]) is not None:
            if len(data) > limit:
                self._num_bytes_left[is_up] = None
                self.num_cuts += 1
                return data[:limit]
            self._num_bytes_left[is_up] = limit - len(data)
        if (until_cut := self._cuts[writer]) is not None:
            if len(data) > until_cut:
                return data[:until_cut]
            self._cuts[writer] = until_cut - len(data)
        return data


@contextlib.asynccontextmanager
async def proxied(
    target: str, *, next_cut: Callable[[], int | None] = lambda: None
) -> AsyncIterator[WireProxy]:
    """A proxy in front of `target`, ended with the block."""
    proxy = WireProxy(target, next_cut=next_cut)
    proxy.address = await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
