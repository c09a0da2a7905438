"""Memory for packed weights: side by side in large pages, which are quicker to find and read ahead in."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from triptych_kernels.cpu.memory import LARGE_PAGE_BYTES, prefer_large_pages

_CHUNK_BYTES = 16 * LARGE_PAGE_BYTES
_CACHE_LINE = 64


class PanelMemory:
    """Hands out pieces of large chunks, one behind the other; a chunk lives as long as any piece of it.

    Projections are smaller than a few large pages, and apart most of each would lie in small ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Nothing here keeps a chunk: without its last piece, another one is begun.
        self._last: weakref.ref[Tensor] | None = None

    def take(self, num_bytes: int) -> Tensor:
        """Uninitialised bytes at a 64-byte boundary.

        More than a chunk are apart: a small piece behind them would keep all of them.
        """
        if num_bytes > _CHUNK_BYTES:
            return own_panels(num_bytes)
        with self._lock:
            last = None if self._last is None else self._last()
            piece = None if last is None else _piece_behind(last, num_bytes)
            if piece is None:
                piece = own_panels(_CHUNK_BYTES)[:num_bytes]
            self._last = weakref.ref(piece)
            return piece


def own_panels(num_bytes: int) -> Tensor:
    """Uninitialised bytes at a 64-byte boundary that share their memory with nothing; many in large pages."""
    alignment = LARGE_PAGE_BYTES if num_bytes >= LARGE_PAGE_BYTES else _CACHE_LINE
    memory = torch.empty(num_bytes + alignment, dtype=torch.uint8)
    panels = memory[-memory.data_ptr() % alignment :][:num_bytes]
    prefer_large_pages(panels.data_ptr(), num_bytes)
    return panels


def _piece_behind(last: Tensor, num_bytes: int) -> Tensor | None:
    """The bytes that follow `last` in its chunk, if there are as many."""
    storage = last.untyped_storage()
    start = last.storage_offset() + last.nbytes + -last.nbytes % _CACHE_LINE
    end = -storage.data_ptr() % LARGE_PAGE_BYTES + _CHUNK_BYTES
    if start + num_bytes > end:
        return None
    return torch.empty(0, dtype=torch.uint8).set_(storage, start, (num_bytes,), (1,))
