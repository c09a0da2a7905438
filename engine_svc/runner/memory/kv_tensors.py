"""The memory of the paged KV cache: the tensors of its blocks, and their sizes."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_svc.model.context import LayerCache
from engine_svc.model.facts import KVShape, LayerGroup, ModelFacts
from engine_svc.runner.memory.prefault import Prefault, run_beside
from engine_svc.runner.memory.state_tensors import StateTensors, bytes_per_slot
from engine_svc.runner.sampling.transfer import to_device

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MIB = 1 << 20


class KVCapacityError(ValueError):
    """The cache would not hold one request of full length; the message gives the numbers."""


@dataclass(frozen=True, slots=True)
class KVSizing:
    """The size of the cache. Block ids are 0 to num_blocks - 1."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    num_state_slots: int = 0  # beside the blocks

    @property
    def total_bytes(self) -> int:
        """The size of the tensors of blocks, once every block has been used."""
        return self.num_blocks * self.bytes_per_block


def assign_layers(
    shapes: Sequence[KVShape], groups: Sequence[LayerGroup]
) -> tuple[dict[KVShape, int], list[int]]:
    """The number of tensor pairs of each shape, and the index of each layer among those of its shape.

    A block belongs to one group at a time, so layers of different groups can share tensors; layers of one
    group cannot. What a token sees is no part of a shape here.
    """
    counts: Counter[KVShape] = Counter()
    index_of = [0] * len(shapes)
    for group in groups:
        used: Counter[KVShape] = Counter()
        for layer in group.layers:
            shape = shapes[layer].of_memory
            index_of[layer] = used[shape]
            used[shape] += 1
        counts |= used
    return dict(counts), index_of


def bytes_per_block(facts: ModelFacts, block_size: int) -> int:
    """The size of one block in all tensors."""
    counts, _ = assign_layers(facts.kv_shapes, facts.groups)
    values = sum(
        count * shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape, count in counts.items()
    )
    return values * block_size * DTYPES[facts.dtype].itemsize


def max_blocks_per_request(
    groups: Sequence[LayerGroup], *, num_tokens: int, max_in_flight_tokens: int, block_size: int
) -> int:
    """The maximum number of blocks that a request of `num_tokens` holds at once, in all groups together."""
    total = 0
    for group in groups:
        whole = -(-num_tokens // block_size)
        if group.chunk is not None:
            # A chunk begins with a block.
            total += -(-min(group.chunk + max_in_flight_tokens, num_tokens) // block_size)
        elif group.window is None:
            total += whole
        else:
            # The window, the tokens in flight, and one block more as neither need begin at a block boundary.
            held = min(group.window - 1 + max_in_flight_tokens, num_tokens)
            total += min(-(-held // block_size) + 1, whole)
    return total


class KVTensors:
    """A key cache [B, G, S, D] and a value cache [B, G, S, E] per attention layer.

    Raises KVCapacityError if the device cannot allocate them.
    """

    def __init__(
        self,
        facts: ModelFacts,
        sizing: KVSizing,
        device: torch.device | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """at_once: on a CPU, allocate the memory now, in a separate thread, not when blocks are used."""
        self.sizing = sizing
        self.device = device or torch.device("cpu")
        dtype = DTYPES[facts.dtype]
        counts, index_of = assign_layers(facts.kv_shapes, facts.groups)
        self._keys = {
            shape: self._stack(shape, count, shape.key_dim, dtype) for shape, count in counts.items()
        }
        self._values = {
            shape: self._stack(shape, count, shape.value_dim, dtype) for shape, count in counts.items()
        }
        try:
            self.states = StateTensors(facts.state_shapes, sizing.num_state_slots, self.device)
        except RuntimeError as error:
            num_bytes = sizing.num_state_slots * bytes_per_slot(facts.state_shapes)
            raise KVCapacityError(
                f"{num_bytes / _MIB:.0f} MiB for states cannot be allocated; lower state_cache_memory"
            ) from error
        group_of = {layer: index for index, group in enumerate(facts.groups) for layer in group.layers}
        self.layers: list[LayerCache] = []
        for layer, index in enumerate(index_of):
            shape = facts.kv_shapes[layer].of_memory
            self.layers.append(
                LayerCache(group_of[layer], self._keys[shape][index], self._values[shape][index])
            )
        self._prefault: Prefault | None = None
        if self.device.type == "cpu" and self.layers:
            self._prefault = Prefault(self._block_stacks, run_beside, at_once=at_once)
            self._prefault.restart()

    @property
    def stacks(self) -> list[Tensor]:
        """All of the memory."""
        return [*self._block_stacks, *self.states.stacks]

    @property
    def _block_stacks(self) -> list[Tensor]:
        """The memory of blocks, as tensors [layers, B, G, S, D or E]."""
        return [*self._keys.values(), *self._values.values()]

    def renew(self) -> None:
        """Called when the tensors have new memory, which is not touched yet."""
        if self._prefault is not None:
            self._prefault.restart()

    def reach(self, block_id: int) -> None:
        """A block enters a block table without KV: prepare memory for the next ones."""
        if self._prefault is not None:
            self._prefault.reach(block_id)

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks that enter a block table without KV, as their last owner may have left NaN."""
        if block_ids:
            indices = to_device(np.array(block_ids, dtype=np.int64), self.device)
            for stack in self._block_stacks:
                stack.index_fill_(1, indices, 0)

    def _stack(self, shape: KVShape, count: int, dim: int, dtype: torch.dtype) -> Tensor:
        size = (count, self.sizing.num_blocks, shape.num_kv_heads, self.sizing.block_size, dim)
        try:
            # Not zeroed: untouched memory is not allocated, and `clear` comes before any use.
            return torch.empty(size, dtype=dtype, device=self.device)
        except RuntimeError as error:
            num_bytes = math.prod(size) * dtype.itemsize
            raise KVCapacityError(
                f"{num_bytes / _MIB:.0f} MiB of the KV cache cannot be allocated; lower num_kv_blocks or "
                "kv_cache_memory"
            ) from error
