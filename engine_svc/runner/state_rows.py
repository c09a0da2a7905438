"""Which slots of states the rows of a step read and write. Knows no tensors and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of one step. read: [R], of the state before a row's tokens. write: [T], of that after each token.

    NO_SLOT: a state of zeros is read, or none is written.
    """

    read: Ints
    write: Ints


class StateRows:
    """The newest state of each row, by its slot, as plans say of the group of layers with states.

    A row goes on in its slot until it gains entries: the last of these is its slot from then on. The others,
    and its slot before if a half-filled block ends in this step, get the states after whole blocks.
    """

    def __init__(self, *, max_num_seqs: int, block_size: int, first_id: int) -> None:
        """first_id: of the first slot, in plans."""
        self._block_size = block_size
        self._first_id = first_id
        self._num_entries = np.zeros(max_num_seqs, dtype=np.int64)
        self._newest = np.full(max_num_seqs, NO_SLOT, dtype=np.int64)
        # Of the step that is applied: the slot that a row had before, and states that are kept, each as the
        # number of the row's tokens before it and the slot.
        self._before: dict[int, int] = {}
        self._kept: dict[int, list[tuple[int, int]]] = {}

    def begin_step(self) -> None:
        self._before.clear()
        self._kept.clear()

    def enter(self, row: int, block_ids: Sequence[int]) -> None:
        """A request gets a row, with the entries that it took over."""
        self._num_entries[row] = len(block_ids)
        self._newest[row] = block_ids[-1] - self._first_id if block_ids else NO_SLOT

    def extend(self, row: int, block_ids: Sequence[int], num_computed: int) -> None:
        """A row gains entries, before its tokens after the first `num_computed` are computed."""
        num_entries, before = int(self._num_entries[row]), int(self._newest[row])
        newest = block_ids[-1] - self._first_id
        kept = [
            ((num_entries + index + 1) * self._block_size - num_computed, block_id - self._first_id)
            for index, block_id in enumerate(block_ids[:-1])
            if block_id
        ]
        num_left = num_entries * self._block_size - num_computed
        if before not in (NO_SLOT, newest) and num_left > 0:
            kept.append((num_left, before))
        self._before[row] = before
        if kept:
            self._kept[row] = kept
        self._newest[row] = newest
        self._num_entries[row] = num_entries + len(block_ids)

    def gather(self, rows: Ints, starts: Ints, ends: Ints) -> StateSlots:
        """The slots of the rows of a step.

        starts: [R], their computed tokens.  ends: [R], the step's tokens of each row and those before it.
        """
        newest = self._newest[rows]
        read = np.where(starts > 0, newest, NO_SLOT)
        write = np.full(int(ends[-1]), NO_SLOT, dtype=np.int64)
        write[ends - 1] = newest
        if self._before:
            for index, row in enumerate(rows.tolist()):
                if row in self._before and starts[index]:
                    read[index] = self._before[row]
                first = int(ends[index - 1]) if index else 0
                for num_tokens, slot in self._kept.get(row, ()):
                    write[first + num_tokens - 1] = slot
        return StateSlots(read, write)
