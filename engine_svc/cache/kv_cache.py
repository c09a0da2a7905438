"""The KV of requests in blocks, behind four verbs: match_prefix, admit, grow, release.

Knows requests and blocks, no tensors, no budgets and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.cache.block_hash import BlockHasher
from engine_svc.cache.block_pool import BlockPool
from engine_svc.request import Request


class KVCache:
    """Gives requests the blocks that their next tokens need, and lets later requests find what is computed.

    A block is registered for reuse when the step that fills it is planned, so an identical prompt planned
    later in the same step hits it already. Only full blocks of known tokens are registered, never drafts.
    """

    def __init__(
        self,
        pool: BlockPool,
        hasher: BlockHasher,
        *,
        max_model_len: int,
        num_lookahead_tokens: int = 0,
        drop_last_matched_block: bool = False,
    ) -> None:
        self._pool = pool
        self._hasher = hasher
        self._block_size = hasher.block_size
        self._max_model_len = max_model_len
        self._num_lookahead_tokens = num_lookahead_tokens
        self._drop_last_matched_block = drop_last_matched_block
        self.prefix_queries = 0  # tokens looked up, at first admissions
        self.prefix_hits = 0  # of these, tokens found

    @property
    def block_size(self) -> int:
        """Token places in a block."""
        return self._block_size

    @property
    def num_total_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that someone holds."""
        return self._pool.num_usable_blocks - self._pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of this many computed tokens holds, lookahead included."""
        num_slots = min(num_tokens + self._num_lookahead_tokens, self._max_model_len)
        return -(-num_slots // self._block_size)

    def match_prefix(self, request: Request) -> list[int]:
        """The blocks that hold the longest known beginning of `request`. Changes nothing but its hashes.

        At least one token is left to compute, so a prompt of whole blocks recomputes all of its last one.
        """
        if not self._reads_cache(request):
            return []
        self._hasher.extend(request)
        block_ids = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self._block_size]:
            block_id = self._pool.find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        if self._drop_last_matched_block and block_ids:
            block_ids.pop()
        return block_ids

    def admit(self, request: Request, hit: Sequence[int], num_tokens: int, *, reserve_all: bool) -> bool:
        """Give `request` the matched blocks `hit`, and room for `num_tokens` tokens behind them.

        All or nothing: returns False, and changes nothing, when the pool is short. With `reserve_all` the
        pool must have room for every known token, though only the blocks for `num_tokens` are taken.
        """
        assert not request.block_table, "a request is admitted without blocks"
        num_hit_tokens = len(hit) * self._block_size
        num_needed = self.num_blocks_for(num_hit_tokens + num_tokens)
        if reserve_all:
            num_needed = max(num_needed, -(-min(request.num_tokens, self._max_model_len) // self._block_size))
        # A matched block that nobody holds leaves the free list as well.
        if num_needed - len(hit) + self._pool.count_free(hit) > self._pool.num_free_blocks:
            return False
        if request.num_preemptions == 0 and self._reads_cache(request):
            self.prefix_queries += request.num_tokens
            self.prefix_hits += num_hit_tokens
        self._pool.hold(hit)
        request.block_table = list(hit)
        request.num_computed_tokens = num_hit_tokens
        request.num_registered_blocks = len(hit)
        new_block_ids = self.grow(request, num_tokens)
        assert new_block_ids is not None, "the room was counted before"
        return True

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Reserve blocks so that `num_tokens` more tokens of `request` can be computed; returns the new ones.

        All or nothing: returns None, and changes nothing, when the pool is short.
        """
        table = request.block_table
        end = request.num_computed_tokens + num_tokens
        num_new_blocks = self.num_blocks_for(end) - len(table)
        new_block_ids: list[int] = []
        if num_new_blocks > 0:
            if num_new_blocks > self._pool.num_free_blocks:
                return None
            new_block_ids = self._pool.allocate(num_new_blocks)
            table.extend(new_block_ids)
        quiet_until = len(table) * self._block_size - self._num_lookahead_tokens
        if self._pool.enable_prefix_caching:
            self._register(request, min(end, request.num_tokens))
            quiet_until = min(quiet_until, (request.num_registered_blocks + 1) * self._block_size - 1)
        request.quiet_until = quiet_until
        return new_block_ids

    def commit(self, request: Request, num_tokens: int) -> None:
        """Register the full blocks of the first `num_tokens` tokens, known only after they were planned."""
        if self._pool.enable_prefix_caching:
            self._register(request, num_tokens)

    def release(self, request: Request) -> None:
        """Take all blocks from `request`. What they hold can be found until they are handed out again."""
        # The tail is freed first: a later request is more likely to share the head of this prefix.
        self._pool.release(reversed(request.block_table))
        request.block_table = []
        request.num_registered_blocks = 0
        request.quiet_until = 0

    def reset(self) -> bool:
        """Forget all cached content. Refused, with no change, while a request holds a block."""
        return self._pool.reset()

    def _reads_cache(self, request: Request) -> bool:
        return self._pool.enable_prefix_caching and not request.sampling.skip_reading_prefix_cache

    def _register(self, request: Request, num_tokens: int) -> None:
        first, end = request.num_registered_blocks, num_tokens // self._block_size
        if first >= end:
            return
        self._hasher.extend(request)
        self._pool.register(request.block_table[first:end], request.block_hashes[first:end])
        request.num_registered_blocks = end
