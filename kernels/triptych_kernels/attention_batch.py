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
    `derived` holds index tensors that an implementation shares between layers.
    """

    block_tables: Tensor
    query_starts: Tensor
    total_lengths: Tensor
    block_size: int
    max_query_length: int
    max_total_length: int
    derived: dict[object, object] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.total_lengths.shape[0]

    @property
    def query_lengths(self) -> Tensor:
        """[R] int32, number of tokens that each row computes."""
        return self.query_starts.diff()

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
