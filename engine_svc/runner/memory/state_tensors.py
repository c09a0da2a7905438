"""The memory of the states of recurrent layers: a tensor of slots for each part of a layer's state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine_svc.model.facts import ModelFacts, StateShape
from triptych_kernels import StateBatch


def bytes_per_slot(shapes: Sequence[StateShape]) -> int:
    """The size of one state of all layers."""
    num_values = sum(math.prod(part) for shape in shapes for part in shape.parts)
    return num_values * torch.float32.itemsize


class StateTensors:
    """Per layer its tensors [slots, *part], fp32. A plan's id is that of the slot plus the number of blocks.

    They are not cleared: a row without a state begins with zeros, whatever its slot holds.
    """

    def __init__(self, shapes: Sequence[StateShape], num_slots: int, device: torch.device) -> None:
        self.layers = [
            tuple(torch.empty((num_slots, *part), dtype=torch.float32, device=device) for part in shape.parts)
            for shape in shapes
        ]

    @property
    def stacks(self) -> list[Tensor]:
        """All of the memory."""
        return [tensor for tensors in self.layers for tensor in tensors]


def unused_states(
    facts: ModelFacts, counts: Sequence[int], totals: Sequence[int], device: torch.device
) -> StateBatch | None:
    """For rows that belong to no request: they begin with zeros and leave no state.

    counts, totals: the new tokens of each row, and all of them. None for a model without states.
    """
    if not facts.state_shapes:
        return None
    no_slots = [-1] * len(counts)
    return StateBatch.of(counts, totals, no_slots, no_slots, device=device)
