"""Configuration of a KV cache. Knows no flags and no environment."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.cache.attention import AttentionKind


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """All groups of layers share one pool; each has its own block tables."""

    num_blocks: int  # of the pool, including the placeholder
    groups: tuple[AttentionKind, ...]  # () for a model without KV, whose requests have no blocks
    enable_prefix_caching: bool = True
    num_lookahead_tokens: int = 0  # slots after the scheduled tokens, for a drafter with its own KV
    drop_last_matched_block: bool = False  # the drafter needs the last matched block computed again
    num_state_slots: int = 0  # of layers with KeptState, beside the blocks
    fingerprint: bytes = b""  # of the model, part of the fleet-wide root of all block hashes
