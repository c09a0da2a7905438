"""Any order of the cache's verbs: no block is lost, hits are right and longest, refusals change nothing."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_svc.cache.attention import AttentionKind, ChunkedLocal, FullAttention, SlidingWindow
from engine_svc.cache.block_pool import content_key
from engine_svc.cache.config import CacheConfig
from engine_svc.cache.kv_cache import KVCache
from engine_svc.cache.prefix import PrefixHit
from engine_svc.core.request import Request, RequestStatus
from engine_svc.core.sampling_params import SamplingParams
from tests.engine_svc.core_state import free_block_ids, retained_lots
from tests.simulation.cache_watch import CacheWatch
from tests.simulation.invariants import check_conservation, check_events, check_tables
from tests.simulation.paged_runner import first_read

MAX_MODEL_LEN = 40
GROUPS: tuple[tuple[AttentionKind, ...], ...] = (
    (FullAttention(2),),
    (FullAttention(1),),
    (SlidingWindow(2, 3),),
    (FullAttention(2), SlidingWindow(2, 4)),
    (FullAttention(1), SlidingWindow(1, 3), SlidingWindow(1, 3)),
    (FullAttention(4), SlidingWindow(2, 5)),
    (FullAttention(4), SlidingWindow(2, 2)),
    (ChunkedLocal(2, 6), FullAttention(2)),
)
# Few beginnings, so that requests share them.
PROMPTS = st.builds(
    lambda head, length, tail: [*([head] * length), *tail],
    st.integers(0, 1),
    st.integers(0, 16),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
)


class CacheMachine(RuleBasedStateMachine):
    """Requests come, grow and go. Their tokens count as computed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = CacheWatch()
        self.holders: list[Request] = []
        self.kept: list[list[int]] = []
        self.num_added = 0
        # What was last written to each block: the salt, the group, and the tokens up to its end.
        self.contents: dict[int, tuple[str, int, tuple[int, ...]]] = {}

    @initialize(
        groups=st.sampled_from(GROUPS),
        num_blocks=st.integers(8, 40),
        caches=st.booleans(),
        num_lookahead_tokens=st.sampled_from((0, 0, 2)),
        drops_last=st.booleans(),
    )
    def build(
        self,
        groups: tuple[AttentionKind, ...],
        num_blocks: int,
        caches: bool,
        num_lookahead_tokens: int,
        drops_last: bool,
    ) -> None:
        self.config = CacheConfig(
            num_blocks,
            groups,
            enable_prefix_caching=caches,
            num_lookahead_tokens=num_lookahead_tokens,
            drop_last_matched_block=drops_last and not isinstance(groups[0], ChunkedLocal),
        )
        self.cache = KVCache(
            self.config,
            max_model_len=MAX_MODEL_LEN,
            max_in_flight_tokens=MAX_MODEL_LEN,
            observers=(self.watch,),
        )

    @rule(
        prompt=PROMPTS,
        salt=st.sampled_from(("", "", "tenant")),
        skips_lookup=st.sampled_from((False, False, True)),
        share=st.floats(0, 1),
        reserve_all=st.booleans(),
    )
    def admit(
        self, prompt: list[int], salt: str, skips_lookup: bool, share: float, reserve_all: bool
    ) -> None:
        """A request comes, and computes a part of what is not cached."""
        request = self._make(prompt, salt, skips_lookup)
        hit = self.cache.match_prefix(request)
        self._check_hit(request, hit)
        num_tokens = max(1, int(share * (request.num_tokens - hit.num_tokens)))
        before = self._state()
        new_blocks = self.cache.admit(request, hit, num_tokens, reserve_all=reserve_all)
        if new_blocks is None:
            assert self._state() == before, "a refused admission changed something"
            assert request.block_tables == []
            return
        assert request.num_computed_tokens == hit.num_tokens
        self._compute(request, num_tokens)
        self.holders.append(request)

    @precondition(lambda self: self.holders)
    @rule(place=st.integers(0, 1 << 16), num_tokens=st.integers(1, 6), num_in_flight=st.integers(0, 3))
    def grow(self, place: int, num_tokens: int, num_in_flight: int) -> None:
        """A running request computes more of what it knows, sampling when it knows nothing more."""
        request = self.holders[place % len(self.holders)]
        computed = request.num_computed_tokens
        if computed == request.num_tokens and computed < MAX_MODEL_LEN - 1:
            request.token_ids.append(computed % 3)
        num_tokens = min(num_tokens, request.num_tokens - computed)
        if num_tokens < 1:
            return
        lengths = [len(table.block_ids) for table in request.block_tables]
        new_blocks = self.cache.grow(request, num_tokens, num_in_flight)
        if new_blocks is None:
            assert [len(table.block_ids) for table in request.block_tables] == lengths
            return
        for table, length, block_ids in zip(request.block_tables, lengths, new_blocks, strict=False):
            assert table.block_ids[length:] == block_ids, "tables only grow"
        self._compute(request, num_tokens)

    @precondition(lambda self: self.holders)
    @rule(place=st.integers(0, 1 << 16), keeps=st.booleans())
    def release(self, place: int, keeps: bool) -> None:
        """A request goes; its blocks may be kept for a while."""
        request = self.holders.pop(place % len(self.holders))
        if keeps:
            self.kept.append(self.cache.hold(request))
        self.cache.release(request)
        assert request.block_tables == []

    @precondition(lambda self: self.kept)
    @rule()
    def release_held(self) -> None:
        """Blocks that were kept are not needed any more."""
        self.cache.release_held(self.kept.pop(0))

    @precondition(lambda self: self.holders)
    @rule(place=st.integers(0, 1 << 16), num_tokens=st.integers(0, MAX_MODEL_LEN))
    def retain(self, place: int, num_tokens: int) -> None:
        """Cached blocks of a request stay whatever becomes of it."""
        self.num_added += 1
        self.cache.retain(f"lot {self.num_added}", self.holders[place % len(self.holders)], num_tokens)

    @precondition(lambda self: len(self.cache.retained) > 0)
    @rule()
    def release_retained(self) -> None:
        """The oldest lot is not needed any more."""
        self.cache.retained.release(next(iter(self.cache.retained)))

    @rule()
    def reset(self) -> None:
        """All content is forgotten, if no block is held."""
        is_idle = not self.holders and not self.kept  # what is retained does not count
        before = self._state()
        assert self.cache.reset() is (is_idle or self.cache.num_used_blocks == 0)
        if not is_idle and self.cache.num_used_blocks:
            assert self._state() == before, "a refused reset changed something"

    @invariant()
    def no_block_is_lost(self) -> None:
        """kv-conservation, hash-soundness, and events that match what can be found."""
        check_conservation(self.cache.pool, self.holders, [*self.kept, *retained_lots(self.cache)])
        for request in self.holders:
            check_tables(request, self.cache, self.config, request.num_computed_tokens)
            self._check_contents(request)
        if self.config.enable_prefix_caching:
            check_events(self.cache.pools, self.watch)

    def teardown(self) -> None:
        for request in self.holders:
            self.cache.release(request)
        for block_ids in self.kept:
            self.cache.release_held(block_ids)
        if hasattr(self, "cache"):
            assert self.cache.num_used_blocks == self.cache.retained.num_blocks
            assert self.cache.reset()

    def _make(self, prompt: list[int], salt: str, skips_lookup: bool) -> Request:
        self.num_added += 1
        sampling = SamplingParams(max_tokens=MAX_MODEL_LEN, skip_reading_prefix_cache=skips_lookup)
        request = Request(f"r{self.num_added}", list(prompt), len(prompt), sampling, cache_salt=salt)
        request.max_num_tokens = MAX_MODEL_LEN
        request.move_to(RequestStatus.WAITING)
        request.move_to(RequestStatus.RUNNING)
        return request

    def _state(self) -> tuple[object, ...]:
        pool = self.cache.pool
        counts = [pool.ref_count(block_id) for block_id in range(1, pool.num_usable_blocks + 1)]
        return free_block_ids(pool), counts, pool.num_cached_keys, self.cache.prefix_queries

    def _compute(self, request: Request, num_tokens: int) -> None:
        """Write the KV of tokens, into the blocks that they have in every group."""
        first = request.num_computed_tokens
        request.num_computed_tokens = end = first + num_tokens
        for group, (kind, table) in enumerate(zip(self.config.groups, request.block_tables, strict=True)):
            for index in range(first // kind.block_size, -(-end // kind.block_size)):
                tokens = tuple(request.token_ids[: min((index + 1) * kind.block_size, end)])
                self.contents[table.block_ids[index]] = (request.cache_salt, group, tokens)

    def _check_contents(self, request: Request) -> None:
        """Every block that is still read holds the KV of the request's tokens."""
        computed = request.num_computed_tokens
        for group, (kind, table) in enumerate(zip(self.config.groups, request.block_tables, strict=True)):
            for index in range(
                first_read(kind, computed) // kind.block_size, -(-computed // kind.block_size)
            ):
                tokens = tuple(request.token_ids[: min((index + 1) * kind.block_size, computed)])
                held = self.contents[table.block_ids[index]]
                assert held == (request.cache_salt, group, tokens), "a block holds something else"

    def _check_hit(self, request: Request, hit: PrefixHit) -> None:
        reads = self.config.enable_prefix_caching and not request.sampling.skip_reading_prefix_cache
        longest = self._longest_hit(request) if reads else 0
        if not self.config.drop_last_matched_block:
            assert hit.num_tokens == longest
        elif len(self.config.groups) == 1 and isinstance(self.config.groups[0], FullAttention):
            assert hit.num_tokens == max(0, longest - self.config.groups[0].block_size)
        else:
            assert hit.num_tokens <= longest
        for group, (kind, block_ids) in enumerate(zip(self.config.groups, hit.block_ids, strict=False)):
            assert len(block_ids) * kind.block_size == hit.num_tokens
            for index in range(first_read(kind, hit.num_tokens) // kind.block_size, len(block_ids)):
                tokens = tuple(request.token_ids[: (index + 1) * kind.block_size])
                assert self.contents[block_ids[index]] == (request.cache_salt, group, tokens)

    def _longest_hit(self, request: Request) -> int:
        """The longest beginning of which every group has what the next token reads: by trying all."""
        for length in range(request.num_tokens - 1, 0, -1):
            if all(
                length % kind.block_size == 0 and self._has_all(request, group, kind, length)
                for group, kind in enumerate(self.config.groups)
            ):
                return length
        return 0

    def _has_all(self, request: Request, group: int, kind: AttentionKind, length: int) -> bool:
        hash_block_size = self.cache.hasher.block_size
        num_hashes = kind.block_size // hash_block_size
        self.cache.hasher.extend(request)
        return all(
            self.cache.pool.find(content_key(request.block_hashes[(index + 1) * num_hashes - 1], group))
            for index in range(first_read(kind, length) // kind.block_size, length // kind.block_size)
        )


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
