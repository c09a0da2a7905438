"""The sizes and kinds of a KV cache. Knows no flags and no environment."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.cache.attention import AttentionKind


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a cache is built from. All groups of layers share one pool, each has block tables of its own."""

    num_blocks: int  # of the pool, the placeholder included
    groups: tuple[AttentionKind, ...]
    enable_prefix_caching: bool = True
    num_lookahead_tokens: int = 0  # slots behind the scheduled tokens, for a drafter with KV of its own
    drop_last_matched_block: bool = False  # the drafter needs the last matched block computed again
    fingerprint: bytes = b""  # of the model: where the fleet-wide root of all block hashes begins
