"""The KV of requests in blocks, with four operations: match_prefix, admit, grow, release.

Knows requests and blocks, no tensors, no budgets and no clock.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

from engine_svc.cache.attention import NEVER, FullAttention, KeptState
from engine_svc.cache.block_hash import BlockHasher
from engine_svc.cache.block_pool import BlockPool, JoinedPools, content_key, held_blocks
from engine_svc.cache.config import CacheConfig
from engine_svc.cache.groups import BlockGroup, Limits, group_of
from engine_svc.cache.observer import CacheObserver, StoredBlocks
from engine_svc.cache.prefix import PrefixFinder, PrefixHit
from engine_svc.cache.retained import RetainedBlocks
from engine_svc.core.request import Request


class HitRate:
    """The share of cached tokens over the last `max_requests` requests."""

    def __init__(self, max_requests: int = 1000) -> None:
        if max_requests < 1:
            raise ValueError(f"max_requests is {max_requests}, must be at least 1")
        self._max_requests = max_requests
        self._parts: deque[tuple[int, int, int]] = deque()  # requests, tokens looked up, tokens found
        self._num_requests = 0
        self._num_queries = 0
        self._num_hits = 0

    @property
    def value(self) -> float:
        """The hit rate from 0 to 1; 0 if nothing was looked up."""
        return self._num_hits / self._num_queries if self._num_queries else 0.0

    def add(self, num_requests: int, num_queries: int, num_hits: int) -> None:
        """Count requests together. Beyond the limit the oldest are dropped, but never the newest."""
        self._parts.append((num_requests, num_queries, num_hits))
        self._num_requests += num_requests
        self._num_queries += num_queries
        self._num_hits += num_hits
        while self._num_requests > self._max_requests and len(self._parts) > 1:
            old_requests, old_queries, old_hits = self._parts.popleft()
            self._num_requests -= old_requests
            self._num_queries -= old_queries
            self._num_hits -= old_hits

    def reset(self) -> None:
        self._parts.clear()
        self._num_requests = self._num_queries = self._num_hits = 0


# New blocks of a request, per group. Empty if no group has any.
NewBlocks = list[list[int]]
NO_BLOCKS: NewBlocks = []  # shared: these lists are never changed
_NO_HIT = PrefixHit()


class KVCache:
    """Allocates blocks for the next tokens of requests, and caches computed blocks for later requests.

    A block is registered for reuse when the step that fills it is planned, so an identical prompt planned
    later in the same step hits it already. Only full blocks of known tokens are registered, never drafts.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        max_model_len: int,
        max_in_flight_tokens: int,
        observers: Sequence[CacheObserver] = (),
    ) -> None:
        kinds = config.groups
        self._caches = config.enable_prefix_caching and bool(kinds)
        if self._caches and not all(kind.follows_tokens for kind in kinds):
            raise ValueError("prefix caching is on, but KV of one group depends on more than the tokens")
        self.pool = BlockPool(config.num_blocks, observers)
        self.pools: tuple[BlockPool, ...] = (self.pool,)
        self._all_blocks: BlockPool | JoinedPools = self.pool
        num_state_groups = sum(isinstance(kind, KeptState) for kind in kinds)
        if num_state_groups > 1:
            raise ValueError(f"{num_state_groups} groups have states, which must be one")
        if num_state_groups:
            num_ids = config.num_blocks + config.num_state_slots
            slots = BlockPool(num_ids, observers, first_block_id=config.num_blocks)
            self.pools = self.pool, slots
            self._all_blocks = JoinedPools(self.pools, [int(isinstance(kind, KeptState)) for kind in kinds])
        limits = Limits(max_model_len, max_in_flight_tokens, config.num_lookahead_tokens)
        self._groups: tuple[BlockGroup, ...] = tuple(
            group_of(kind, self.pool, self.pools[-1], limits, caches=self._caches) for kind in kinds
        )
        self.retained = RetainedBlocks(self._all_blocks)
        # Without groups no hash is ever computed.
        hash_block_size = math.gcd(*(kind.block_size for kind in kinds)) or 1
        self.hasher = BlockHasher(hash_block_size, config.fingerprint)
        self._finder = PrefixFinder(
            self._all_blocks, self.hasher, kinds, drop_last=config.drop_last_matched_block
        )
        if self._caches:
            self._finder.require_exact_ends()
        self.gives_back = any(kind.first_unreading(1) != NEVER for kind in kinds)
        # Groups in which a hit must not end with a block of the newest steps.
        self._state_groups = tuple(index for index, kind in enumerate(kinds) if kind.num_unshared_steps)
        # Groups whose layers read every token.
        self._whole_groups = [index for index, kind in enumerate(kinds) if isinstance(kind, FullAttention)]
        self._registered: list[int] = []  # since the last `take_registered`
        self._registered_before: list[int] = []  # what that returned
        self.hit_rate = HitRate()
        self.prefix_queries = 0  # tokens looked up, at first admissions
        self.prefix_hits = 0  # of these, cached tokens
        self.preempted_queries = 0  # the same at later admissions
        self.preempted_hits = 0

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with its own block tables."""
        return len(self._groups)

    @property
    def truncates(self) -> bool:
        """Whether the KV of the first computed tokens is left when the last ones do not count any more."""
        return not self._state_groups

    @property
    def num_total_blocks(self) -> int:
        """Blocks that requests can have."""
        return self.pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_usable_blocks - self.pool.num_free_blocks

    def max_blocks_for(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """Maximum of blocks that a request has at once up to `num_tokens` tokens and the lookahead."""
        return sum(group.max_blocks(num_tokens, num_encoder_tokens) for group in self._groups)

    def prepare(self, request: Request) -> None:
        """Compute the hashes of a new request in advance, if it will be looked up or registered."""
        if self._caches:
            self.hasher.extend(request)

    def match_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix of `request`. Changes nothing but its hashes.

        At least one token is left to compute, so a prompt of whole blocks recomputes its last block.
        A request that has blocks has no hit.
        """
        if request.block_tables or not self._reads_cache(request):
            return _NO_HIT
        return self._finder.find(request)

    def admit(
        self, request: Request, hit: PrefixHit, num_tokens: int, *, reserve_all: bool
    ) -> NewBlocks | None:
        """Give `request` the blocks of `hit` and room for `num_tokens` more tokens; returns the new blocks.

        All or nothing: returns None when the pool is short. Blocks that no layer reads again are released
        first. With `reserve_all` the pool must have room for every known token, though only the blocks for
        `num_tokens` are allocated.
        """
        if request.block_tables and self.gives_back:
            self._release_unread(request, request.num_computed_tokens)
        computed = hit.num_tokens or request.num_computed_tokens
        if not self._has_room(request, hit, computed, computed + num_tokens, reserve_all):
            return None
        if not request.block_tables:
            self._count_lookup(request, hit)
            self._take_over(request, hit, computed)
        new_blocks = self.grow(request, num_tokens)
        assert new_blocks is not None, "the room was counted before"
        return new_blocks

    def reserve(self, request: Request, num_tokens: int) -> NewBlocks | None:
        """Reserve blocks for the first tokens of a waiting request, whose KV is transferred from elsewhere.

        The tokens count as computed, but other requests cannot hit them before this one is admitted, as the
        transfer may not be complete. All or nothing, as `admit`.
        """
        hit = self.match_prefix(request)
        assert not request.block_tables and hit.num_tokens < num_tokens, "only missing blocks are reserved"
        # As after a hit, one token is left to compute.
        computed = min(num_tokens, request.num_tokens - 1)
        if not self._has_room(request, hit, computed, num_tokens, reserve_all=False):
            return None
        self._count_lookup(request, hit)
        self._take_over(request, hit, computed)
        new_blocks = self._allocate(request, num_tokens)
        request.num_computed_tokens = computed
        return new_blocks

    def grow(self, request: Request, num_tokens: int, num_in_flight_tokens: int = 0) -> NewBlocks | None:
        """Reserve blocks so that `num_tokens` more tokens of `request` can be computed; returns the new ones.

        All or nothing: returns None when the pool is short. Blocks that no layer reads again are released
        first, except for tokens in flight or still to be computed.
        """
        end = request.num_computed_tokens + num_tokens
        new_blocks: NewBlocks | None = NO_BLOCKS
        if end > request.room_until:
            if self.gives_back:
                self._release_unread(request, request.num_computed_tokens - num_in_flight_tokens)
            new_blocks = self._allocate(request, end)
            if new_blocks is None:
                return None
        num_known = min(end, request.num_tokens)
        if num_known >= request.registers_at:
            self._register(request, num_known)
        request.quiet_until = min(request.room_until, request.registers_at - 1)
        return new_blocks

    def commit(self, request: Request, num_tokens: int) -> None:
        """Register full blocks of the first `num_tokens` tokens, whose ids were unknown when planned."""
        if num_tokens >= request.registers_at:
            num_planned = len(self._registered)
            self._register(request, num_tokens)
            # These are computed already, so they never have to be invalidated.
            del self._registered[num_planned:]

    def release(self, request: Request, num_withdrawn_tokens: int = 0) -> None:
        """Release all blocks of `request`. Their content stays cached until they are allocated again.

        The content of withdrawn tokens, the last ones, is dropped: it was registered but is never computed.
        """
        num_written_tokens = None
        if num_withdrawn_tokens:
            num_written_tokens = request.num_computed_tokens - num_withdrawn_tokens
        for group, table in zip(self._groups, request.block_tables, strict=False):
            group.release(table, num_written_tokens)
        request.block_tables = []
        request.quiet_until = request.room_until = request.registers_at = 0

    def take_registered(self) -> Sequence[int]:
        """The blocks registered since the last call, which the step being planned is to fill."""
        self._registered_before, self._registered = self._registered, []
        return self._registered_before

    def invalidate(self, block_ids: Sequence[int]) -> None:
        """Drop the cached content of these blocks, as it was never computed. They keep their holders."""
        self._all_blocks.invalidate(block_ids)

    def hold(self, request: Request) -> list[int]:
        """Keep the blocks of `request` allocated after its end, e.g. while they are sent.

        Returns them for `release_held`, in the order of their release.
        """
        block_ids = [
            block_id for table in request.block_tables for block_id in held_blocks(reversed(table.block_ids))
        ]
        self._all_blocks.hold(block_ids)
        return block_ids

    def release_held(self, block_ids: Sequence[int]) -> None:
        """Release blocks that `hold` has returned."""
        self._all_blocks.release(block_ids)

    def retain(self, key: str, request: Request, num_tokens: int) -> int:
        """Retain the cached blocks of the first `num_tokens` tokens of `request`, also after its end.

        Returns how many these are. Blocks that no layer reads again are not retained.
        """
        block_ids = []
        for group, table in zip(self._groups, request.block_tables, strict=False):
            block_ids += group.retainable(table, num_tokens)
        if block_ids:
            self.retained.add(key, block_ids)
        return len(block_ids)

    def cost_of_release(self, request: Request) -> tuple[int, int]:
        """The cost of preempting `request`: tokens to compute again, and blocks that become free.

        Leading blocks that other requests share stay cached, so their tokens are not lost. An estimate.
        """
        num_freed, num_kept_tokens = 0, request.num_computed_tokens
        for group, table in zip(self._groups, request.block_tables, strict=True):
            num_kept, num_blocks = group.cost_of_release(table, request.num_computed_tokens)
            num_kept_tokens = min(num_kept_tokens, num_kept)
            num_freed += num_blocks
        return request.num_computed_tokens - num_kept_tokens, num_freed

    def num_common_blocks(self, requests: Sequence[Request]) -> list[int]:
        """Number of leading blocks that the tables of all these requests share, by group; [] if none.

        0 for groups whose layers do not read all tokens: those of windows, chunks and states.
        """
        if len(requests) < 2:
            return []
        counts = [0] * len(self._groups)
        for index in self._whole_groups:
            counts[index] = _num_common([request.block_tables[index].block_ids for request in requests])
        return counts if any(counts) else []

    def reset(self) -> bool:
        """Clear the prefix cache, and release what is retained.

        Returns False, and changes nothing, while a request has a block.
        """
        if not self.retained.hold_all_used:
            return False
        for key in list(self.retained):
            self.retained.release(key)
        self._all_blocks.reset()
        self.hit_rate.reset()
        return True

    def _reads_cache(self, request: Request) -> bool:
        return self._caches and not request.sampling.skip_reading_prefix_cache

    def _has_room(self, request: Request, hit: PrefixHit, computed: int, end: int, reserve_all: bool) -> bool:
        if any(hit.block_ids and self._is_too_new(hit, index) for index in self._state_groups):
            return False
        if not self._all_blocks.has_free(self._wanted_blocks(request, hit, computed, end)):
            return False
        return not reserve_all or self._all_blocks.has_free(
            self._wanted_blocks(request, hit, computed, request.num_tokens, whole=True)
        )

    def _is_too_new(self, hit: PrefixHit, index: int) -> bool:
        """Whether a request has to wait for the state with which a hit ends in a group."""
        group, block_id = self._groups[index], hit.block_ids[index][-1]
        if group.kind.num_unshared_steps > 1 and block_id in self._registered_before:
            # The request that wrote it reads it in its next step, if it is still there.
            return group.pool.ref_count(block_id) > 0
        return block_id in self._registered

    def _wanted_blocks(
        self, request: Request, hit: PrefixHit, computed: int, end: int, *, whole: bool = False
    ) -> list[int]:
        """How many blocks leave the free list for tokens up to `end`, in each group.

        whole: at most at any one time.
        """
        return [
            group.num_wanted(
                request,
                request.block_tables[index] if request.block_tables else None,
                hit.block_ids[index] if hit.block_ids else [],
                computed,
                end,
                whole=whole,
            )
            for index, group in enumerate(self._groups)
        ]

    def _count_lookup(self, request: Request, hit: PrefixHit) -> None:
        if not self._reads_cache(request):
            return
        if request.num_preemptions or request.num_lost_tokens:
            self.preempted_queries += request.num_tokens
            self.preempted_hits += hit.num_tokens
            return
        self.prefix_queries += request.num_tokens
        self.prefix_hits += hit.num_tokens
        self.hit_rate.add(1, request.num_tokens, hit.num_tokens)

    def _take_over(self, request: Request, hit: PrefixHit, computed: int) -> None:
        """Begin the block tables with the blocks of the hit that are still read after `computed` tokens."""
        request.num_computed_tokens = hit.num_tokens
        request.block_tables = [
            group.take_over(hit.block_ids[index] if hit.block_ids else [], computed)
            for index, group in enumerate(self._groups)
        ]

    def _allocate(self, request: Request, end: int) -> NewBlocks | None:
        """Allocate blocks for the tokens up to `end` in every group; None when the pool is short."""
        groups, tables = self._groups, request.block_tables
        num_missing = [
            group.num_missing(request, table, end) for group, table in zip(groups, tables, strict=True)
        ]
        if not self._all_blocks.has_free(num_missing):
            return None
        new_blocks = []
        room_until = NEVER
        for group, table, num_blocks in zip(groups, tables, num_missing, strict=True):
            new_blocks.append(group.extend(request, table, num_blocks, end))
            group_room = group.room_until(table)
            if group_room < room_until:
                room_until = group_room
        request.room_until = room_until
        return new_blocks if any(new_blocks) else NO_BLOCKS

    def _release_unread(self, request: Request, num_settled_tokens: int) -> None:
        for group, table in zip(self._groups, request.block_tables, strict=True):
            group.release_unread(request, table, num_settled_tokens)

    def _register(self, request: Request, num_tokens: int) -> None:
        if not self._caches:
            request.registers_at = NEVER
            return
        self.hasher.extend(request)
        registers_at = NEVER
        for index, group in enumerate(self._groups):
            block_size, table = group.kind.block_size, request.block_tables[index]
            end = self._finder.num_cacheable_tokens(num_tokens, block_size) // block_size
            for first, behind in group.unregistered(table, end):
                self._register_blocks(request, index, first, behind)
            if end > table.num_registered:
                table.num_registered = end
            group_registers_at = (table.num_registered + 1) * block_size
            if group_registers_at < registers_at:
                registers_at = group_registers_at
        request.registers_at = registers_at

    def _register_blocks(self, request: Request, group: int, first: int, end: int) -> None:
        block_size = self._groups[group].kind.block_size
        num_hashes = block_size // self.hasher.block_size
        hashes = request.block_hashes[(first + 1) * num_hashes - 1 : end * num_hashes : num_hashes]
        keys = [content_key(block_hash, group) for block_hash in hashes]
        block_ids = request.block_tables[group].block_ids[first:end]
        self._groups[group].pool.register(block_ids, keys)
        self._registered += block_ids
        if not self.pool.observers:
            return
        hash_index = first * num_hashes
        if hash_index:
            parent = request.block_hashes[hash_index - 1]
        else:
            parent = self.hasher.root(request.cache_salt, request.extra_keys)
        token_ids = request.token_ids[first * block_size : end * block_size]
        stored = StoredBlocks(hashes, parent, token_ids, block_size, group, request.variant)
        for observer in self.pool.observers:
            observer.on_store(stored)


def _num_common(tables: Sequence[list[int]]) -> int:
    """Number of leading entries that all the tables share."""
    shared = min(tables, key=len)
    for table in tables:
        # Slices are compared many times as fast as entries one by one.
        if table[: len(shared)] != shared:
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(shared, table, strict=False))
            shared = shared[: sum(1 for _ in same)]
        if not shared:
            break
    return len(shared)
