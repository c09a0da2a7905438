"""Small requests and caches for tests of the cache."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.cache.attention import AttentionKind, FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.cache.kv_cache import KVCache
from engine_svc.cache.observer import CacheObserver
from engine_svc.core.request import ContentSpan, Request
from engine_svc.core.sampling_params import SamplingParams
from tests.engine_svc.core_state import free_block_ids, key_of

BLOCK_SIZE = 16


def request(
    request_id: str,
    token_ids: list[int],
    *,
    salt: str = "",
    extra_keys: tuple[str, ...] = (),
    spans: tuple[ContentSpan, ...] = (),
    num_encoder_tokens: int = 0,
    skips_lookup: bool = False,
    max_tokens: int = 1000,
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, skip_reading_prefix_cache=skips_lookup)
    return Request(
        request_id,
        list(token_ids),
        len(token_ids),
        sampling,
        cache_salt=salt,
        extra_keys=extra_keys,
        spans=spans,
        num_encoder_tokens=num_encoder_tokens,
    )


def tokens(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


class SmallCache:
    """A cache, its pool, and admission of whole prompts in one call."""

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = BLOCK_SIZE,
        enable_prefix_caching: bool = True,
        num_lookahead_tokens: int = 0,
        drop_last_matched_block: bool = False,
        groups: Sequence[AttentionKind] = (),
        fingerprint: bytes = b"",
        observers: Sequence[CacheObserver] = (),
        max_model_len: int = 100_000,
        max_in_flight_tokens: int = 100_000,
    ) -> None:
        self.cache = KVCache(
            CacheConfig(
                num_blocks,
                tuple(groups) or (FullAttention(block_size),),
                enable_prefix_caching=enable_prefix_caching,
                num_lookahead_tokens=num_lookahead_tokens,
                drop_last_matched_block=drop_last_matched_block,
                fingerprint=fingerprint,
            ),
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            observers=observers,
        )
        self.pool = self.cache.pool

    def admit(self, admitted: Request) -> bool:
        """Take over what is cached and make room for the rest; all of it then counts as computed."""
        hit = self.cache.match_prefix(admitted)
        num_tokens = admitted.num_tokens - hit.num_tokens
        if self.cache.admit(admitted, hit, num_tokens, reserve_all=False) is None:
            return False
        admitted.num_cached_tokens = admitted.num_computed_tokens
        admitted.num_computed_tokens = admitted.num_tokens
        return True

    def admitted(self, admitted: Request) -> Request:
        """The request, which has to find room."""
        assert self.admit(admitted)
        return admitted

    def append(self, running: Request, new_tokens: list[int]) -> list[int] | None:
        """Compute tokens that came behind; returns the new blocks."""
        running.token_ids.extend(new_tokens)
        return self.compute(running, len(new_tokens))

    def compute(self, running: Request, num_tokens: int, *, num_in_flight: int = 0) -> list[int] | None:
        """Compute so many tokens more; returns the new blocks."""
        new_block_ids = self.cache.grow(running, num_tokens, num_in_flight)
        if new_block_ids is None:
            return None
        running.num_computed_tokens += num_tokens
        return [block_id for block_ids in new_block_ids for block_id in block_ids]

    def evict(self, block_id: int) -> None:
        """Have one free block handed out, and none of the others; afterwards it is free without content."""
        others = [free_id for free_id in free_block_ids(self.pool) if free_id != block_id]
        self.pool.hold(others)
        taken = self.pool.allocate(1)
        assert taken == [block_id]
        self.pool.release([block_id, *others])

    def hashes_of(self, holder: Request) -> list[bytes | None]:
        """By which hash each block of a request can be found."""
        return [key_of(self.pool, block_id) for table in holder.block_tables for block_id in table.block_ids]

    def ref_counts_of(self, holder: Request) -> list[int]:
        return [
            self.pool.ref_count(block_id) for table in holder.block_tables for block_id in table.block_ids
        ]


def tables_of(holder: Request) -> list[list[int]]:
    """The blocks that a request holds, group by group."""
    return [list(table.block_ids) for table in holder.block_tables]


def table_of(holder: Request, group: int = 0) -> list[int]:
    """The blocks that a request holds in a group; [] without any."""
    return holder.block_tables[group].block_ids if holder.block_tables else []
