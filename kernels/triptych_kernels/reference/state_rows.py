"""The rows of a step, token by token: what all ops that keep a state per row have in common."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from triptych_kernels.state_batch import StateBatch


def advance_rows(states: Tensor, batch: StateBatch, step: Callable[[int, Tensor], Tensor]) -> None:
    """Compute each row's states in order of its tokens, and store those that have a slot.

    states: [slots, ...] fp32, written.  step(token, state): the state after the token, from the one before.
    """
    starts, write_slots = batch.query_starts.tolist(), batch.write_slots.tolist()
    for row, slot in enumerate(batch.read_slots.tolist()):
        if starts[row] == starts[row + 1]:
            continue
        state = states[slot].clone() if slot >= 0 else states.new_zeros(states.shape[1:])
        for token in range(starts[row], starts[row + 1]):
            state = step(token, state)
            if write_slots[token] >= 0:
                states[write_slots[token]] = state
