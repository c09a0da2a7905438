"""The memory of the paged KV cache: how many blocks there are, and the tensors that hold them."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from engine_svc.model.facts import KVShape, ModelFacts

logger = logging.getLogger(__name__)

# Free memory that the cache may take when nobody said how much.
_DEFAULT_SHARE = 0.25
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MIB = 1 << 20


class KVCapacityError(ValueError):
    """The cache would not hold one request of full length; the message gives the numbers."""


@dataclass(frozen=True, slots=True)
class KVSizing:
    """How large the cache is. Block ids are 0 to num_blocks - 1."""

    num_blocks: int
    block_size: int
    bytes_per_block: int

    @property
    def total_bytes(self) -> int:
        """What the tensors take once every block has been used."""
        return self.num_blocks * self.bytes_per_block


def size_kv_cache(
    facts: ModelFacts,
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_memory: int | None = None,
    num_kv_blocks: int | None = None,
) -> KVSizing:
    """Choose the number of blocks: num_kv_blocks, else what kv_cache_memory or a share of free memory holds.

    Never more than max_num_seqs requests of full length can use, unless num_kv_blocks says so.
    Raises KVCapacityError when one request of max_model_len tokens does not fit.
    """
    itemsize = _DTYPES[facts.dtype].itemsize
    values_per_token = sum(
        shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in facts.kv_shapes
    )
    bytes_per_block = values_per_token * block_size * itemsize
    blocks_per_request = -(-max_model_len // block_size)
    if num_kv_blocks is not None:
        num_blocks, source = num_kv_blocks, f"num_kv_blocks is {num_kv_blocks}"
    elif kv_cache_memory is not None:
        num_blocks = kv_cache_memory // bytes_per_block
        source = f"kv_cache_memory of {kv_cache_memory} bytes holds {num_blocks}"
    else:
        free = psutil.virtual_memory().available
        num_blocks = int(free * _DEFAULT_SHARE) // bytes_per_block
        source = f"{_DEFAULT_SHARE:.0%} of {free / _MIB:.0f} MiB free memory hold {num_blocks}"
    if num_blocks < blocks_per_request:
        shorter = f"lower max_model_len to at most {num_blocks * block_size} or " if num_blocks else ""
        raise KVCapacityError(
            f"one request of max_model_len {max_model_len} needs {blocks_per_request} blocks of {block_size} "
            f"tokens, {blocks_per_request * bytes_per_block} bytes, but {source}; "
            f"{shorter}give the cache more memory"
        )
    if num_kv_blocks is None:
        num_blocks = min(num_blocks, max_num_seqs * blocks_per_request)
    sizing = KVSizing(num_blocks, block_size, bytes_per_block)
    free = psutil.virtual_memory().available
    if sizing.total_bytes > free:
        # Nothing is taken before it is used, so this shows only when most of the blocks have been.
        logger.warning(
            "the KV cache is larger than free memory",
            extra={"kv_cache_mib": sizing.total_bytes // _MIB, "free_mib": free // _MIB},
        )
    return sizing


class KVTensors:
    """A key cache [G, B, S, D] and a value cache [G, B, S, E] per attention layer; equals lie together.

    Raises KVCapacityError where the machine has no room for them at all.
    """

    def __init__(self, facts: ModelFacts, sizing: KVSizing) -> None:
        self.sizing = sizing
        self._stacks: list[Tensor] = []
        layers_of: dict[KVShape, list[int]] = defaultdict(list)
        for layer, shape in enumerate(facts.kv_shapes):
            layers_of[shape].append(layer)
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        dtype = _DTYPES[facts.dtype]
        for shape, layers in layers_of.items():
            for caches, dim in ((keys, shape.key_dim), (values, shape.value_dim)):
                stack = _allocate(
                    (len(layers), shape.num_kv_heads, sizing.num_blocks, sizing.block_size, dim), dtype
                )
                self._stacks.append(stack)
                caches.update(zip(layers, stack.unbind(0), strict=True))
        self.key_caches = [keys[layer] for layer in range(facts.num_layers)]
        self.value_caches = [values[layer] for layer in range(facts.num_layers)]

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks that enter a block table without KV: what their last owner left, NaN too, ends here."""
        for stack in self._stacks:
            for block_id in block_ids:
                stack[:, :, block_id].zero_()


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    try:
        # Not zeroed: memory that was never touched costs nothing, and `clear` comes before any use.
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        num_bytes = math.prod(shape) * dtype.itemsize
        raise KVCapacityError(
            f"{num_bytes / _MIB:.0f} MiB of the KV cache cannot be allocated; lower num_kv_blocks or "
            "kv_cache_memory"
        ) from error
