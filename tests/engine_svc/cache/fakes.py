"""Small requests and caches for tests of the cache."""

from __future__ import annotations

from engine_svc.cache.block_hash import BlockHasher
from engine_svc.cache.block_pool import BlockPool
from engine_svc.cache.kv_cache import KVCache
from engine_svc.request import Request
from engine_svc.sampling_params import SamplingParams

BLOCK_SIZE = 16


def request(request_id: str, token_ids: list[int], *, salt: str = "", skips_lookup: bool = False) -> Request:
    """A request with these prompt tokens."""
    sampling = SamplingParams(max_tokens=1000, skip_reading_prefix_cache=skips_lookup)
    return Request(request_id, list(token_ids), len(token_ids), sampling, cache_salt=salt)


def tokens(num_tokens: int, first: int = 0) -> list[int]:
    """Different tokens, counted from `first`."""
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
    ) -> None:
        self.pool = BlockPool(num_blocks, enable_prefix_caching=enable_prefix_caching)
        self.cache = KVCache(
            self.pool,
            BlockHasher(block_size),
            max_model_len=100_000,
            num_lookahead_tokens=num_lookahead_tokens,
            drop_last_matched_block=drop_last_matched_block,
        )

    def admit(self, admitted: Request) -> bool:
        """Take over what is cached and make room for the rest; all of it then counts as computed."""
        hit = self.cache.match_prefix(admitted)
        num_tokens = admitted.num_tokens - len(hit) * self.cache.block_size
        if not self.cache.admit(admitted, hit, num_tokens, reserve_all=False):
            return False
        admitted.num_cached_tokens = admitted.num_computed_tokens
        admitted.num_computed_tokens = admitted.num_tokens
        return True

    def append(self, running: Request, new_tokens: list[int]) -> list[int] | None:
        """Compute tokens that came behind; returns the new blocks."""
        running.token_ids.extend(new_tokens)
        new_block_ids = self.cache.grow(running, len(new_tokens))
        if new_block_ids is not None:
            running.num_computed_tokens += len(new_tokens)
        return new_block_ids

    def hashes_of(self, holder: Request) -> list[bytes | None]:
        """By which hash each block of a request can be found."""
        return [self.pool.block_hash(block_id) for block_id in holder.block_table]

    def ref_counts_of(self, holder: Request) -> list[int]:
        """How many hold each block of a request."""
        return [self.pool.ref_count(block_id) for block_id in holder.block_table]
