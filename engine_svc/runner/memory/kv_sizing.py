"""Chooses the numbers of blocks and of state slots, from the configuration or from free memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from engine_svc.model.facts import ModelFacts
from engine_svc.runner.memory.kv_tensors import (
    KVCapacityError,
    KVSizing,
    bytes_per_block,
    max_blocks_per_request,
)
from engine_svc.runner.memory.state_tensors import bytes_per_slot

logger = logging.getLogger(__name__)

_MIB = 1 << 20
# Without a configured size: the share of free memory for kept states, and how many of them for each row.
_KEPT_SHARE, _MAX_KEPT_PER_ROW = 0.25, 16


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The memory available for the cache, and a description of how it was determined."""

    num_bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class KVCacheOptions:
    """The configured sizes. Blocks take precedence over bytes, bytes over free memory."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int  # of all steps in flight
    kv_cache_memory: int | None = None
    num_kv_blocks: int | None = None
    state_cache_memory: int | None = None
    keeps_states: bool = True


def size_states(facts: ModelFacts, options: KVCacheOptions, free: FreeMemory) -> int:
    """Choose the number of state slots: as configured, or those that rows need and some for kept states.

    0 for a model without states. Raises KVCapacityError if the rows do not have what they need.
    """
    if not facts.state_shapes:
        return 0
    size = bytes_per_slot(facts.state_shapes)
    # A request that goes on from a kept state reads its slot and writes another.
    needed = options.max_num_seqs + 1
    if options.state_cache_memory is None:
        source = f"{free.how} hold {free.num_bytes // size} states"
        fitting = free.num_bytes // size
        num_kept = min(int(free.num_bytes * _KEPT_SHARE) // size, _MAX_KEPT_PER_ROW * options.max_num_seqs)
        num_slots = needed + (num_kept if options.keeps_states else 0)
    else:
        fitting = num_slots = options.state_cache_memory // size
        source = f"state_cache_memory of {options.state_cache_memory} bytes holds {fitting} states"
    if fitting < needed:
        raise KVCapacityError(
            f"max_num_seqs of {options.max_num_seqs} needs {needed} states of {size} bytes, {needed * size} "
            f"bytes, but {source}; lower max_num_seqs or give states more memory"
        )
    return min(num_slots, fitting)


def without_states(facts: ModelFacts, free: FreeMemory, num_slots: int) -> FreeMemory:
    """The memory that is left for blocks beside the states."""
    if not num_slots:
        return free
    num_bytes = num_slots * bytes_per_slot(facts.state_shapes)
    how = f"{free.how}, less {num_bytes // _MIB} MiB for states,"
    return FreeMemory(max(0, free.num_bytes - num_bytes), how)


def size_kv_cache(
    facts: ModelFacts, options: KVCacheOptions, *, max_model_len: int, free: FreeMemory
) -> KVSizing:
    """Choose the number of blocks: as configured, or as many as fit into free memory.

    Never more than max_num_seqs requests of full length can use, unless num_kv_blocks is set.
    A model without KV has one block, which takes no memory.
    Raises KVCapacityError if one request of max_model_len tokens does not fit, ValueError if tokens see only
    their own chunk of a sequence and chunks are no whole blocks.
    """
    if not facts.groups:
        return KVSizing(1, options.block_size, 0)
    for chunk in {group.chunk for group in facts.groups if group.chunk is not None}:
        if chunk % options.block_size:
            raise ValueError(
                f"block_size is {options.block_size}, it must divide {chunk}: the model attends in chunks "
                "of that length"
            )
    size = bytes_per_block(facts, options.block_size)
    needed = _blocks_of(facts, options, max_model_len)
    num_blocks, source = _found_blocks(options, size, free)
    if num_blocks < needed:
        fitting = longest_fitting(facts, options, num_blocks)
        shorter = f"lower max_model_len to at most {fitting} or " if fitting else ""
        raise KVCapacityError(
            f"one request of max_model_len {max_model_len} needs {needed} blocks of {options.block_size} "
            f"tokens, {needed * size} bytes, but {source}; {shorter}give the cache more memory"
        )
    max_blocks = options.max_num_seqs * needed
    if options.num_kv_blocks is None:
        num_blocks = min(num_blocks, max_blocks)
    sizing = KVSizing(num_blocks, options.block_size, size)
    if sizing.total_bytes > free.num_bytes:
        # A CPU's memory is allocated on first use, so this fails only when most blocks have been used.
        logger.warning(
            "the KV cache is larger than free memory",
            extra={"kv_cache_mib": sizing.total_bytes // _MIB, "free_mib": free.num_bytes // _MIB},
        )
    return sizing


def warn_if_cut(kv_cache_memory: int, sizings: Sequence[KVSizing]) -> None:
    """Log a warning if ranks with so much memory together were given less, by whole blocks."""
    used = sum(sizing.total_bytes for sizing in sizings)
    if kv_cache_memory - used >= sum(sizing.bytes_per_block for sizing in sizings):
        logger.warning(
            "kv_cache_memory is cut to what max_num_seqs requests of max_model_len tokens can use",
            extra={"asked_mib": kv_cache_memory // _MIB, "used_mib": used // _MIB},
        )


def fit_max_model_len(facts: ModelFacts, options: KVCacheOptions, free: FreeMemory) -> int:
    """The longest sequence that fits into the cache, at most the model's limit; warns if it is less.

    Raises KVCapacityError if not even one block fits.
    """
    if not facts.groups:
        return facts.max_position
    num_blocks, source = _found_blocks(options, bytes_per_block(facts, options.block_size), free)
    if num_blocks >= _blocks_of(facts, options, facts.max_position):
        return facts.max_position
    fitting = longest_fitting(facts, options, num_blocks)
    if fitting < 2:
        raise KVCapacityError(f"{source}, too few for any request; give the cache more memory")
    logger.warning(
        f"max_model_len is {fitting} instead of the model's {facts.max_position}: {source}",
        extra={"max_model_len": fitting, "model_max_position": facts.max_position, "num_blocks": num_blocks},
    )
    return fitting


def longest_fitting(facts: ModelFacts, options: KVCacheOptions, num_blocks: int) -> int:
    """The maximum number of tokens of a request that fit into `num_blocks`, by bisection."""
    fits, too_long = 0, facts.max_position + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if _blocks_of(facts, options, middle) <= num_blocks:
            fits = middle
        else:
            too_long = middle
    return fits


def _blocks_of(facts: ModelFacts, options: KVCacheOptions, num_tokens: int) -> int:
    return max_blocks_per_request(
        facts.groups,
        num_tokens=num_tokens,
        max_in_flight_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
    )


def _found_blocks(options: KVCacheOptions, size: int, free: FreeMemory) -> tuple[int, str]:
    if options.num_kv_blocks is not None:
        return options.num_kv_blocks, f"num_kv_blocks is {options.num_kv_blocks}"
    if options.kv_cache_memory is not None:
        num_blocks = options.kv_cache_memory // size
        return num_blocks, f"kv_cache_memory of {options.kv_cache_memory} bytes holds {num_blocks} blocks"
    num_blocks = max(0, free.num_bytes) // size
    return num_blocks, f"{free.how} hold {num_blocks} blocks"
