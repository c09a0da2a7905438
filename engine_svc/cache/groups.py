"""Groups of layers: which blocks a request's table gains and loses in one of them.

Knows tables and a pool, no hashes and no other group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine_svc.cache.attention import NEVER, AlignedState, AttentionKind, KeptState
from engine_svc.cache.block_pool import PLACEHOLDER_BLOCK_ID, BlockPool, held_blocks
from engine_svc.core.request import BlockTable, Request, RequestStatus


@dataclass(frozen=True, slots=True)
class Limits:
    """What the tables of all groups have room for."""

    max_model_len: int
    max_in_flight_tokens: int  # of all steps in flight
    num_lookahead_tokens: int  # slots after the scheduled tokens


class BlockGroup(Protocol):
    """Layers of one kind, which share a block table per request."""

    @property
    def kind(self) -> AttentionKind: ...

    @property
    def pool(self) -> BlockPool: ...

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

    def retainable(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Cached blocks that a hit of at most `num_tokens` tokens reads, in the order of their release."""
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
        self._follows_tokens = kind.follows_tokens
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
        num_slots = end + self._num_lookahead_tokens
        if num_slots > self._max_model_len:
            num_slots = self._max_model_len
        if not self._follows_tokens:
            num_slots = self.kind.num_slots(num_slots, request.num_encoder_tokens)
        num_missing = -(-num_slots // self.kind.block_size) - len(table.block_ids)
        return max(0, num_missing)

    def extend(self, request: Request, table: BlockTable, num_missing: int, end: int) -> list[int]:
        if not num_missing:
            return []
        block_ids = self.pool.allocate(num_missing)
        table.block_ids += block_ids
        return block_ids

    def room_until(self, table: BlockTable) -> int:
        block_size, room_until = self.kind.block_size, NEVER
        if self._follows_tokens:
            room_until = len(table.block_ids) * block_size - self._num_lookahead_tokens
        if self._gives_back:
            unread_at = self.kind.first_unreading((table.num_released + 1) * block_size)
            return min(room_until, unread_at)
        return room_until

    def take_over(self, block_ids: list[int], computed: int) -> BlockTable:
        return take_over(self.kind, self.pool, block_ids, computed)

    def release_unread(self, request: Request, table: BlockTable, num_settled_tokens: int) -> None:
        release_unread(self.kind, self.pool, table, num_settled_tokens)

    def unregistered(self, table: BlockTable, end: int) -> Sequence[tuple[int, int]]:
        # Blocks that were released already are not registered.
        first = max(table.num_registered, table.num_released)
        return ((first, end),) if first < end else ()

    def release(self, table: BlockTable, num_written_tokens: int | None) -> None:
        release_table(self.kind, self.pool, table, num_written_tokens)

    def retainable(self, table: BlockTable, num_tokens: int) -> list[int]:
        return retainable(self.kind, table, num_tokens)

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


class AlignedStates:
    """A group of AlignedState: a step appends one entry with a block, however far it goes.

    The last entries of a table are the newest state and those of drafts.
    """

    def __init__(self, kind: AlignedState, pool: BlockPool) -> None:
        self.kind = kind
        self.pool = pool
        self._num_drafts = kind.num_speculative_blocks

    def max_blocks(self, num_tokens: int, num_encoder_tokens: int) -> int:
        return self.kind.max_blocks(num_tokens, 0)

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
        if table is not None:
            return self.num_missing(request, table, end)
        return 1 + self._num_drafts + self.pool.count_free(held_blocks(taken_over))

    def num_missing(self, request: Request, table: BlockTable, end: int) -> int:
        if -(-end // self.kind.block_size) + self._num_drafts <= len(table.block_ids):
            return 0
        return 1 + self._num_drafts if self._is_new(table) else 1

    def extend(self, request: Request, table: BlockTable, num_missing: int, end: int) -> list[int]:
        if not num_missing:
            return []
        block_ids, last = table.block_ids, -(-end // self.kind.block_size) - 1
        length = len(block_ids)
        drafts = [] if self._is_new(table) else list(range(length - self._num_drafts, length))
        block_ids += [PLACEHOLDER_BLOCK_ID] * (last - length)
        # Blocks of drafts that the state has passed are used again.
        for index in drafts:
            if index < last:
                block_ids.append(block_ids[index])
                block_ids[index] = PLACEHOLDER_BLOCK_ID
        block_ids += self.pool.allocate(num_missing)
        return block_ids[length:]

    def room_until(self, table: BlockTable) -> int:
        kind = self.kind
        room_until = (len(table.block_ids) - self._num_drafts) * kind.block_size
        return min(room_until, kind.first_unreading((table.num_released + 1) * kind.block_size))

    def take_over(self, block_ids: list[int], computed: int) -> BlockTable:
        return take_over(self.kind, self.pool, block_ids, computed)

    def release_unread(self, request: Request, table: BlockTable, num_settled_tokens: int) -> None:
        release_unread(self.kind, self.pool, table, num_settled_tokens)

    def unregistered(self, table: BlockTable, end: int) -> Sequence[tuple[int, int]]:
        return states_of(table, end)

    def release(self, table: BlockTable, num_written_tokens: int | None) -> None:
        release_table(self.kind, self.pool, table, num_written_tokens)

    def retainable(self, table: BlockTable, num_tokens: int) -> list[int]:
        return retainable(self.kind, table, num_tokens)

    def cost_of_release(self, table: BlockTable, num_computed_tokens: int) -> tuple[int, int]:
        block_ids = held_blocks(table.block_ids)
        num_freed = sum(self.pool.ref_count(block_id) == 1 for block_id in block_ids)
        return table.num_registered * self.kind.block_size, num_freed

    def _is_new(self, table: BlockTable) -> bool:
        """Whether it has the blocks of a hit alone. Without drafts both kinds of tables gain one block."""
        return len(table.block_ids) == table.num_registered


@dataclass(slots=True)
class StateTable(BlockTable):
    """The states of one request. The last entry is the newest, which each step replaces."""

    num_hit: int = 0  # leading entries that another request computed
    # States of this request that it does not read any more: index, slot and content.
    kept: list[tuple[int, int, bytes]] = field(default_factory=list)  # by a rule
    border: tuple[int, int, bytes] | None = None  # the newest of the others, until the next whole block


class KeptStates:
    """A group of KeptState. A running request holds one slot; others are taken only while some are free.

    Where none is, the request goes on in its slot, so that the state there is not kept.
    """

    def __init__(self, kind: KeptState, pool: BlockPool, *, caches: bool) -> None:
        self.kind = kind
        self.pool = pool
        self._caches = caches

    def max_blocks(self, num_tokens: int, num_encoder_tokens: int) -> int:
        return self.kind.max_blocks(num_tokens, 0)

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
        if table is not None:
            return self.num_missing(request, table, end)
        return 1 + self.pool.count_free(held_blocks(taken_over))

    def num_missing(self, request: Request, table: BlockTable, end: int) -> int:
        if end <= len(table.block_ids) * self.kind.block_size:
            return 0
        # A request that enters the batch reads the last slot of its table and writes another.
        goes_on = request.status is RequestStatus.RUNNING and self.pool.ref_count(table.block_ids[-1]) == 1
        return 0 if goes_on else 1

    def extend(self, request: Request, table: BlockTable, num_missing: int, end: int) -> list[int]:
        kind, pool, block_ids = self.kind, self.pool, table.block_ids
        length, last = len(block_ids), (end - 1) // kind.block_size
        if last < length:
            return []
        is_border = request.num_computed_tokens == length * kind.block_size
        is_kept = is_border or self._keeps(request, length)
        if num_missing or (self._caches and is_kept and pool.num_free_blocks):
            (newest,) = pool.allocate(1)
        else:
            newest, block_ids[-1] = block_ids[-1], PLACEHOLDER_BLOCK_ID
            pool.invalidate((newest,))
        entries = [PLACEHOLDER_BLOCK_ID] * (last - length) + [newest]
        # The last first: where slots are few, a request that goes on from here computes least.
        for index in reversed(range(length, last) if self._caches else ()):
            if not pool.num_free_blocks:
                break
            if self._keeps(request, index + 1):
                (entries[index - length],) = pool.allocate(1)
        block_ids += entries
        return entries

    def room_until(self, table: BlockTable) -> int:
        room_until, num_passed = len(table.block_ids) * self.kind.block_size, table.num_released + 1
        if num_passed < len(table.block_ids):
            room_until = min(room_until, self.kind.first_unreading(num_passed * self.kind.block_size))
        return room_until

    def take_over(self, block_ids: list[int], computed: int) -> BlockTable:
        table = take_over(self.kind, self.pool, block_ids, computed)
        return StateTable(table.block_ids, table.num_registered, table.num_released, len(block_ids))

    def release_unread(self, request: Request, table: BlockTable, num_settled_tokens: int) -> None:
        assert isinstance(table, StateTable)
        kind, block_ids = self.kind, table.block_ids
        end = kind.num_unread_tokens(num_settled_tokens) // kind.block_size
        for index in range(table.num_released, end):
            if slot := block_ids[index]:
                block_ids[index] = PLACEHOLDER_BLOCK_ID
                self.pool.release((slot,))
                if index >= table.num_hit and (content := self.pool.content_of(slot)) is not None:
                    self._note_passed(request, table, (index, slot, content))
        table.num_released = max(table.num_released, end)

    def _note_passed(self, request: Request, table: StateTable, state: tuple[int, int, bytes]) -> None:
        if self._keeps(request, state[0] + 1):
            table.kept.append(state)
            return
        if table.border is not None:
            self.pool.drop(*table.border[1:])
        table.border = state

    def _keeps(self, request: Request, num_blocks: int) -> bool:
        num_tokens = num_blocks * self.kind.block_size
        return num_tokens == request.parts_at or self.kind.keeps(num_tokens, request.num_prompt_tokens)

    def unregistered(self, table: BlockTable, end: int) -> Sequence[tuple[int, int]]:
        return states_of(table, end)

    def release(self, table: BlockTable, num_written_tokens: int | None) -> None:
        assert isinstance(table, StateTable)
        pool, slots = self.pool, held_blocks(table.block_ids)
        # The newest state is reused last: it is the one that a continued request hits.
        pool.release(slots)
        passed = table.kept if table.border is None else [*table.kept, table.border]
        if num_written_tokens is not None:
            first = num_written_tokens // self.kind.block_size
            pool.forget(held_blocks(table.block_ids[first:]))
            for index, slot, content in passed:
                if index >= first:
                    pool.drop(slot, content)
        elif table.border is not None and any(pool.content_of(slot) is not None for slot in slots):
            pool.drop(*table.border[1:])

    def retainable(self, table: BlockTable, num_tokens: int) -> list[int]:
        assert isinstance(table, StateTable)
        slots = retainable(self.kind, table, num_tokens)
        if slots or table.border is None or table.border[0] >= num_tokens // self.kind.block_size:
            return slots[:1]
        _, slot, content = table.border
        return [slot] if self.pool.content_of(slot) == content else []

    def cost_of_release(self, table: BlockTable, num_computed_tokens: int) -> tuple[int, int]:
        return num_computed_tokens // self.kind.block_size * self.kind.block_size, 0


def retainable(kind: AttentionKind, table: BlockTable, num_tokens: int) -> list[int]:
    """The registered blocks of the first `num_tokens` tokens that a table still has, the last first."""
    end = min(num_tokens // kind.block_size, table.num_registered)
    return held_blocks(reversed(table.block_ids[:end]))


def states_of(table: BlockTable, end: int) -> list[tuple[int, int]]:
    """The states before entry `end` that are not cached yet, each a run of its own."""
    first = max(table.num_registered, table.num_released)
    return [(index, index + 1) for index in range(first, end) if table.block_ids[index]]


def release_unread(kind: AttentionKind, pool: BlockPool, table: BlockTable, num_settled_tokens: int) -> None:
    """Release the blocks that no token after the settled ones reads, the last first."""
    end = min(kind.num_unread_tokens(num_settled_tokens) // kind.block_size, len(table.block_ids))
    first = table.num_released
    if end <= first:
        return
    pool.release(held_blocks(reversed(table.block_ids[first:end])))
    table.block_ids[first:end] = [PLACEHOLDER_BLOCK_ID] * (end - first)
    table.num_released = end


def release_table(
    kind: AttentionKind, pool: BlockPool, table: BlockTable, num_written_tokens: int | None
) -> None:
    """Release all blocks of a table. Content of tokens after the written ones is dropped, if any are not."""
    # The tail is freed first: a later request is more likely to share the head of this prefix.
    pool.release(held_blocks(reversed(table.block_ids)))
    if num_written_tokens is not None:
        first = num_written_tokens // kind.block_size
        pool.forget(held_blocks(table.block_ids[first : table.num_registered]))


def take_over(kind: AttentionKind, pool: BlockPool, block_ids: list[int], computed: int) -> BlockTable:
    """A table that begins with the blocks of a hit, held, or with placeholders where none is read again."""
    num_unread = kind.num_unread_tokens(computed) // kind.block_size
    kept = block_ids[num_unread:]
    if kept:
        pool.hold(kept)
    return BlockTable([PLACEHOLDER_BLOCK_ID] * num_unread + kept, len(block_ids), num_unread)


def group_of(
    kind: AttentionKind, pool: BlockPool, slots: BlockPool, limits: Limits, *, caches: bool
) -> BlockGroup:
    """A group of layers of this kind. slots: the pool of states that have one of their own."""
    if isinstance(kind, KeptState):
        return KeptStates(kind, slots, caches=caches)
    if isinstance(kind, AlignedState):
        return AlignedStates(kind, pool)
    return TokenBlocks(kind, pool, limits)
