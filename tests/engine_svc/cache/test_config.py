"""What a cache is built with where nobody says anything."""

from __future__ import annotations

from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.cache.kv_cache import KVCache
from tests.engine_svc.cache.fakes import request, table_of, tokens


def test_by_default_beginnings_are_shared_whole_and_no_slot_lies_ahead():
    cache = KVCache(CacheConfig(11, (FullAttention(16),)), max_model_len=1000, max_in_flight_tokens=1000)
    first, second = request("a", tokens(48)), request("b", tokens(49))
    assert cache.admit(first, cache.match_prefix(first), 48, reserve_all=False) == [[1, 2, 3]]
    assert cache.match_prefix(second).num_tokens == 48
    assert table_of(first) == [1, 2, 3]
    assert (
        cache.hasher.root()
        == KVCache(
            CacheConfig(11, (FullAttention(16),), fingerprint=b""),
            max_model_len=1000,
            max_in_flight_tokens=1000,
        ).hasher.root()
    )
