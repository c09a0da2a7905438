"""Inputs of attention that all layers of a step share. Built once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class AttentionBatch:
    """Rows of a step: number of tokens to compute, total length, and the blocks of their KV.

    block_tables: [R, max_blocks] int32, last dimension contiguous, row r valid up to
    ceil(total_lengths[r] / block_size) columns.
    query_starts: [R + 1] int32; row r computes the step's tokens query_starts[r] to query_starts[r + 1] - 1.
    A row without tokens is padding: nothing of it is read.
    total_lengths: [R] int32, tokens of the row with KV once this step's are written.
    max_query_length, max_total_length: at least the largest of the rows, known without waiting for the
    device.
    num_common_blocks: leading blocks that the tables of all rows share, at most; attention without a window
    may read them once for all rows. Results do not depend on it.
    `derived` holds index tensors that an implementation shares between layers.
    """

    block_tables: Tensor
    query_starts: Tensor
    total_lengths: Tensor
    block_size: int
    max_query_length: int
    max_total_length: int
    num_common_blocks: int = 0
    derived: dict[object, object] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.total_lengths.shape[0]

    @property
    def query_lengths(self) -> Tensor:
        """[R] int32, number of tokens that each row computes."""
        return self.query_starts.diff()

    def in_local_chunks(self, size: int) -> AttentionBatch:
        """The same tokens, of which each sees only the tokens of its own chunk of `size`, whole blocks.

        What a row computes of a chunk is a row of its own, with the blocks of that chunk. All is computed on
        the device, which is not waited for: rows that this leaves without tokens are padding.
        """
        if self.max_total_length <= size:
            return self
        found = self.derived.get(("local chunks", size))
        if found is None:
            found = self.derived["local chunks", size] = self._in_local_chunks(size)
        return found  # type: ignore[return-value]  # Only this method writes the key.

    def _in_local_chunks(self, size: int) -> AttentionBatch:
        if size % self.block_size:
            raise ValueError(f"chunks of {size} tokens are no whole blocks of {self.block_size}")
        device, num_columns = self.block_tables.device, size // self.block_size
        # So many chunks can one row's tokens be in.
        num_chunks = (max(self.max_query_length, 1) + size - 2) // size + 1
        totals = self.total_lengths[:, None].long()
        starts = totals - self.query_lengths[:, None]
        chunks = starts // size + torch.arange(num_chunks, device=device)  # [R, num_chunks]
        firsts = torch.maximum(chunks * size, starts)
        ends = torch.minimum((chunks + 1) * size, totals)
        query_lengths = (ends - firsts).clamp_(min=0).flatten()
        query_starts = torch.cat([query_lengths.new_zeros(1), query_lengths.cumsum(0)])
        columns = chunks[..., None] * num_columns + torch.arange(num_columns, device=device)
        tables = self.block_tables.gather(1, columns.flatten(1).clamp_(max=self.block_tables.shape[1] - 1))
        return AttentionBatch(
            block_tables=tables.view(-1, num_columns),
            query_starts=query_starts.int(),
            total_lengths=(ends - chunks * size).clamp_(min=0).flatten().int(),
            block_size=self.block_size,
            max_query_length=min(self.max_query_length, size),
            max_total_length=size,
        )

    @classmethod
    def of(
        cls, block_tables: Tensor, query_lengths: Sequence[int], total_lengths: Sequence[int], block_size: int
    ) -> AttentionBatch:
        """The batch of these rows, on the device of their block tables."""
        device = block_tables.device
        starts = torch.zeros(len(query_lengths) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(query_lengths, dtype=torch.int32), 0, out=starts[1:])
        return cls(
            block_tables=block_tables.to(torch.int32),
            query_starts=starts.to(device),
            total_lengths=torch.tensor(total_lengths, dtype=torch.int32, device=device),
            block_size=block_size,
            max_query_length=max(query_lengths, default=0),
            max_total_length=max(total_lengths, default=0),
        )
