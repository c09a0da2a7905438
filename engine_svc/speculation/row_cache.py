"""A small KV cache of a network that proposes: of each row its first tokens and its newest ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_svc.model.context import ForwardContext, LayerCache
from engine_svc.model.facts import KVShape
from triptych_kernels import AttentionBatch

Ints = npt.NDArray[np.int64]

BLOCK_SIZE = 16


class RowCache:
    """Every row has as many blocks. When they are full, the oldest block but the first is used again.

    The first tokens stay because attention relies on them (Xiao et al. 2023, attention sinks). Keys carry
    the positions that they were computed with, so tokens between two others can be left out.
    """

    def __init__(
        self, shapes: Sequence[KVShape], dtype: torch.dtype, num_rows: int, window: int, device: torch.device
    ) -> None:
        """window: tokens of a row that are kept at most, 4 blocks or more."""
        self._shapes, self._dtype, self._device = shapes, dtype, device
        num_columns = num_blocks_of(window)
        self._num_blocks = num_rows * num_columns
        self._tables = np.arange(self._num_blocks, dtype=np.int32).reshape(num_rows, num_columns)
        self.capacity = num_columns * BLOCK_SIZE
        # Of each row: tokens in the cache, and the position of the next one, which may leave some out.
        self.num_kept: Ints = np.zeros(num_rows, dtype=np.int64)
        self.ends: Ints = np.zeros(num_rows, dtype=np.int64)
        self._layers: list[LayerCache] = []
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        return bool(self._layers)

    def allocate(self) -> None:
        self._layers = [
            LayerCache(
                0,
                self._zeros(shape.num_kv_heads, shape.key_dim),
                self._zeros(shape.num_kv_heads, shape.value_dim),
            )
            for shape in self._shapes
        ]

    def release(self) -> None:
        """Release the memory. No row may be in use."""
        self._layers = []

    def clear(self, row: int) -> None:
        """Forget the row's tokens."""
        self.num_kept[row] = self.ends[row] = 0

    def make_room(self, rows: Ints, counts: Ints) -> None:
        """counts: tokens to be added to each row, at most `capacity` less two blocks."""
        excess = self.num_kept[rows] + counts - self.capacity
        for row, num_tokens in zip(rows[excess > 0], excess[excess > 0], strict=True):
            num_blocks = -(-int(num_tokens) // BLOCK_SIZE)
            self._tables[row, 1:] = np.roll(self._tables[row, 1:], -num_blocks)
            self.num_kept[row] -= num_blocks * BLOCK_SIZE

    def context(self, rows: Ints, counts: Ints, ahead: int = 0) -> ForwardContext:
        """Context of a forward that appends `counts[i]` tokens to row i, after `ahead` tokens not kept."""
        totals = self.num_kept[rows] + ahead + counts
        of_rows = np.repeat(rows, counts)
        indices = np.arange(len(of_rows)) + np.repeat(totals - np.cumsum(counts), counts)
        columns = indices // BLOCK_SIZE
        slots = self._tables[of_rows, columns].astype(np.int64) * BLOCK_SIZE + indices - columns * BLOCK_SIZE
        num_columns = -(-int(totals.max()) // BLOCK_SIZE)
        table = torch.from_numpy(self._tables[rows, :num_columns]).to(self._device)
        batch = AttentionBatch.of(table, counts.tolist(), totals.tolist(), BLOCK_SIZE)
        return ForwardContext(self._layers, [torch.from_numpy(slots).to(self._device)], [batch])

    def advance(self, rows: Ints, counts: Ints) -> None:
        """Keep `counts[i]` more tokens of row i."""
        self.num_kept[rows] += counts
        self.ends[rows] += counts

    def _zeros(self, num_heads: int, dim: int) -> Tensor:
        size = (self._num_blocks, num_heads, BLOCK_SIZE, dim)
        return torch.zeros(size, dtype=self._dtype, device=self._device)


def num_blocks_of(window: int) -> int:
    """Blocks per row."""
    return -(-window // BLOCK_SIZE)


def cache_bytes(shapes: Sequence[KVShape], dtype: torch.dtype, num_rows: int, window: int) -> int:
    """Memory of a cache with these sizes."""
    values = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    return values * dtype.itemsize * num_rows * num_blocks_of(window) * BLOCK_SIZE
