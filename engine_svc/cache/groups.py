"""Groups of layers: which blocks a request's table gains and loses in one of them.

Knows tables and a pool, no hashes and no other group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_svc.cache.attention import NEVER, AttentionKind
from engine_svc.cache.block_pool import PLACEHOLDER_BLOCK_ID, BlockPool, held_blocks
from engine_svc.core.request import BlockTable, Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What the tables of all groups have room for."""

    max_model_len: int
    max_in_flight_tokens: int  # of all steps in flight
    num_lookahead_tokens: int  # slots after the scheduled tokens


class BlockGroup(Protocol):
    """Layers of one kind, which share a block table per request."""

    kind: AttentionKind
    pool: BlockPool

    def max_blocks(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Maximum of blocks that a request has at once up to this number of tokens."""
        ...

    def num_wanted(
        self,
        request: Request,
        table: BlockTable | None,
        taken_over: list[int],
        computed: int,
        end: int,
        *,
        whole: bool,
    ) -> int:
        """How many blocks leave the free list if a waiting request computes its tokens up to `end`.

        table: None of a request without blocks, which takes over those of a hit.
        computed: tokens before the first to compute.  whole: at most at any one time.
        """
        ...

    def num_missing(self, request: Request, table: BlockTable, end: int) -> int:
        """How many blocks `extend` needs at least."""
        ...

    def extend(self, request: Request, table: BlockTable, num_missing: int, end: int) -> list[int]:
        """Append blocks for the tokens up to `end` to a table; returns the new entries."""
        ...

    def room_until(self, table: BlockTable) -> int:
        """Up to how many tokens nothing has to be appended or released."""
        ...

    def take_over(self, block_ids: list[int], computed: int) -> BlockTable:
        """A table that begins with the blocks of a hit that are still read after `computed` tokens."""
        ...

    def release_unread(self, request: Request, table: BlockTable, num_settled_tokens: int) -> None:
        """Release the blocks that no token after the settled ones reads."""
        ...

    def unregistered(self, table: BlockTable, end: int) -> Sequence[tuple[int, int]]:
        """Runs of entries before entry `end` whose content can be cached and is not yet."""
        ...

    def release(self, table: BlockTable, num_written_tokens: int | None) -> None:
        """Release all blocks of a table.

        num_written_tokens: cached content of later tokens is dropped; None: all is valid.
        """
        ...

    def cost_of_release(self, table: BlockTable, num_computed_tokens: int) -> tuple[int, int]:
        """An estimate of leading tokens that stay cached without the request, and of blocks that it frees."""
        ...


class TokenBlocks:
    """A group whose tables have a block for each `block_size` slots, in order."""

    def __init__(self, kind: AttentionKind, pool: BlockPool, limits: Limits) -> None:
        self.kind = kind
        self.pool = pool
        self._limits = limits
        self._max_model_len = limits.max_model_len
        self._num_lookahead_tokens = limits.num_lookahead_tokens
        self._gives_back = kind.first_unreading(1) != NEVER

    def max_blocks(self, num_tokens: int, num_encoder_tokens: int) -> int:
        num_slots = min(num_tokens + self._num_lookahead_tokens, self._max_model_len)
        num_ahead = self._limits.max_in_flight_tokens + self._num_lookahead_tokens
        return self.kind.max_blocks(self.kind.num_slots(num_slots, num_encoder_tokens), num_ahead)

    def num_wanted(
        self,
        request: Request,
        table: BlockTable | None,
        taken_over: list[int],
        computed: int,
        end: int,
        *,
        whole: bool,
    ) -> int:
        kind, max_model_len = self.kind, self._max_model_len
        num_slots = min(end if whole else end + self._num_lookahead_tokens, max_model_len)
        num_blocks = -(-kind.num_slots(num_slots, request.num_encoder_tokens) // kind.block_size)
        if whole:
            num_blocks = min(num_blocks, kind.max_blocks(max_model_len, self._limits.max_in_flight_tokens))
        if table is not None:
            return max(0, num_blocks - len(table.block_ids))
        num_unread = kind.num_unread_tokens(computed) // kind.block_size
        num_new = max(0, num_blocks - max(num_unread, len(taken_over)))
        # A matched block without a holder leaves the free list as well.
        return num_new + self.pool.count_free(held_blocks(taken_over[num_unread:]))

    def num_missing(self, request: Request, table: BlockTable, end: int) -> int:
        kind = self.kind
        num_slots = min(end + self._num_lookahead_tokens, self._max_model_len)
        num_blocks = -(-kind.num_slots(num_slots, request.num_encoder_tokens) // kind.block_size)
        return max(0, num_blocks - len(table.block_ids))

    def extend(self, request: Request, table: BlockTable, num_missing: int, end: int) -> list[int]:
        if not num_missing:
            return []
        block_ids = self.pool.allocate(num_missing)
        table.block_ids += block_ids
        return block_ids

    def room_until(self, table: BlockTable) -> int:
        kind = self.kind
        room_until = NEVER
        if kind.follows_tokens:
            room_until = len(table.block_ids) * kind.block_size - self._num_lookahead_tokens
        if self._gives_back:
            room_until = min(room_until, kind.first_unreading((table.num_released + 1) * kind.block_size))
        return room_until

    def take_over(self, block_ids: list[int], computed: int) -> BlockTable:
        return take_over(self.kind, self.pool, block_ids, computed)

    def release_unread(self, request: Request, table: BlockTable, num_settled_tokens: int) -> None:
        kind = self.kind
        end = min(kind.num_unread_tokens(num_settled_tokens) // kind.block_size, len(table.block_ids))
        first = table.num_released
        if end <= first:
            return
        self.pool.release(held_blocks(reversed(table.block_ids[first:end])))
        table.block_ids[first:end] = [PLACEHOLDER_BLOCK_ID] * (end - first)
        table.num_released = end

    def unregistered(self, table: BlockTable, end: int) -> Sequence[tuple[int, int]]:
        # Blocks that were released already are not registered.
        first = max(table.num_registered, table.num_released)
        return ((first, end),) if first < end else ()

    def release(self, table: BlockTable, num_written_tokens: int | None) -> None:
        # The tail is freed first: a later request is more likely to share the head of this prefix.
        self.pool.release(held_blocks(reversed(table.block_ids)))
        if num_written_tokens is not None:
            first = num_written_tokens // self.kind.block_size
            self.pool.forget(held_blocks(table.block_ids[first : table.num_registered]))

    def cost_of_release(self, table: BlockTable, num_computed_tokens: int) -> tuple[int, int]:
        """Assumes that requests which share a block share all blocks before it."""
        low, high = table.num_released, len(table.block_ids)
        while low < high:
            middle = (low + high) // 2
            if self.pool.ref_count(table.block_ids[middle]) > 1:
                low = middle + 1
            else:
                high = middle
        # Blocks before the window are released already: without shared blocks in it all tokens are lost.
        num_kept_blocks = low if low > table.num_released else 0
        return num_kept_blocks * self.kind.block_size, len(table.block_ids) - low


def take_over(kind: AttentionKind, pool: BlockPool, block_ids: list[int], computed: int) -> BlockTable:
    """A table that begins with the blocks of a hit, held, or with placeholders where none is read again."""
    num_unread = kind.num_unread_tokens(computed) // kind.block_size
    kept = block_ids[num_unread:]
    if kept:
        pool.hold(kept)
    return BlockTable([PLACEHOLDER_BLOCK_ID] * num_unread + kept, len(block_ids), num_unread)
