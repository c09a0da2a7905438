"""Inputs of ops that keep a state per row, shared by all layers of a step. Built once per step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class StateBatch:
    """Rows of a step: their tokens, the slot of the state that each starts from, and those that it leaves.

    query_starts: [R + 1] int32; row r computes the step's tokens query_starts[r] to query_starts[r + 1] - 1.
    A row without tokens is padding: nothing of it is read.
    total_lengths: [R] int32, tokens of the row whose state is known once this step has run.
    read_slots: [R] int32, the slot of the state after the tokens before this step; below 0: zeros.
    write_slots: [T] int32, the slot that gets the state after this token; below 0: none.
    A slot is written at most once in a step. A slot that a row reads is written by no other row.
    max_query_length: at least the largest of the rows, known without waiting for the device.
    `derived` holds what an implementation shares between layers.
    """

    query_starts: Tensor
    total_lengths: Tensor
    read_slots: Tensor
    write_slots: Tensor
    max_query_length: int
    derived: dict[object, object] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.read_slots.shape[0]

    @classmethod
    def of(
        cls,
        query_lengths: Sequence[int],
        total_lengths: Sequence[int],
        read_slots: Sequence[int],
        last_slots: Sequence[int],
        *,
        kept: Iterable[tuple[int, int, int]] = (),
        device: torch.device | str = "cpu",
    ) -> StateBatch:
        """The batch of these rows.

        last_slots: of each row, the slot of the state after its last token.
        kept: further states as (row, number of the step's tokens of the row, slot).
        """
        starts = torch.zeros(len(query_lengths) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(query_lengths, dtype=torch.int32), 0, out=starts[1:])
        firsts = starts.tolist()
        write_slots = torch.full((firsts[-1],), -1, dtype=torch.int32)
        for row, (length, slot) in enumerate(zip(query_lengths, last_slots, strict=True)):
            if length:
                write_slots[firsts[row + 1] - 1] = slot
        for row, num_tokens, slot in kept:
            write_slots[firsts[row] + num_tokens - 1] = slot
        return cls(
            query_starts=starts.to(device),
            total_lengths=torch.tensor(total_lengths, dtype=torch.int32, device=device),
            read_slots=torch.tensor(read_slots, dtype=torch.int32, device=device),
            write_slots=write_slots.to(device),
            max_query_length=max(query_lengths, default=0),
        )
