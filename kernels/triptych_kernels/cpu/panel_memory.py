"""Memory for packed weights: contiguous in large pages, which have fewer TLB misses and prefetch well."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from triptych_kernels.cpu.memory import LARGE_PAGE_BYTES, prefer_large_pages

_CHUNK_BYTES = 16 * LARGE_PAGE_BYTES
_CACHE_LINE = 64


class PanelMemory:
    """Allocates pieces of large chunks, one after the other; a chunk lives as long as any of its pieces.

    Most projections are smaller than a few large pages; allocated separately, most of each would be in small
    pages.
    """

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        """chunk_bytes: a multiple of LARGE_PAGE_BYTES."""
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        # Nothing here keeps a chunk alive: without its last piece, a new one is begun.
        self._last: weakref.ref[Tensor] | None = None

    def take(self, num_bytes: int) -> Tensor:
        """Uninitialised bytes at a 64-byte boundary.

        Pieces larger than a chunk are separate: a small piece after them would keep all of their memory.
        """
        if num_bytes > self._chunk_bytes:
            return own_panels(num_bytes)
        with self._lock:
            last = None if self._last is None else self._last()
            piece = None if last is None else _piece_behind(last, num_bytes, self._chunk_bytes)
            if piece is None:
                piece = own_panels(self._chunk_bytes)[:num_bytes]
            self._last = weakref.ref(piece)
            return piece


def own_panels(num_bytes: int) -> Tensor:
    """Uninitialised bytes at a 64-byte boundary in an allocation of their own; many in large pages."""
    alignment = LARGE_PAGE_BYTES if num_bytes >= LARGE_PAGE_BYTES else _CACHE_LINE
    memory = torch.empty(num_bytes + alignment, dtype=torch.uint8)
    panels = memory[-memory.data_ptr() % alignment :][:num_bytes]
    prefer_large_pages(panels.data_ptr(), num_bytes)
    return panels


def _piece_behind(last: Tensor, num_bytes: int, chunk_bytes: int) -> Tensor | None:
    """The bytes that follow `last` in its chunk, if there are enough."""
    storage = last.untyped_storage()
    start = last.storage_offset() + last.nbytes + -last.nbytes % _CACHE_LINE
    end = -storage.data_ptr() % LARGE_PAGE_BYTES + chunk_bytes
    if start + num_bytes > end:
        return None
    return torch.empty(0, dtype=torch.uint8).set_(storage, start, (num_bytes,), (1,))
