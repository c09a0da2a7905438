"""Affinity: which engine a key or a slot prefers, and when a preferred engine is too loaded."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from frontend_svc.engines.routing.engine_info import EngineInfo, RoutingRequest
from frontend_svc.engines.routing.least_loaded import kv_aware, work

# Prompts of one kind usually share this many tokens, and other prompts rarely do.
_PREFIX_TOKENS = 64
_PREFIX_STEP = 16
# A preferred engine is skipped if its work exceeds `ratio * (work of the least loaded) + slack`.
_GUARD_RATIO = 2.0
_GUARD_SLACK_TOKENS = 1024


def prefix_affinity(engines: Sequence[EngineInfo], request: RoutingRequest, turn: int) -> EngineInfo:
    """The engine preferred by the session, else by the prompt's prefix; the next one if it is too loaded.

    An engine that joins or leaves moves only the keys that prefer it. Without a key: as `kv_aware`.
    """
    key = request.session_id.encode() or request.prefix_hash
    if not key:
        return kv_aware(engines, request, turn)
    # The least loaded one is always within the limit.
    allowed = _not_too_loaded(engines, engines, request)
    return by_preference(allowed, key)[0]


def with_slot(engines: Sequence[EngineInfo], request: RoutingRequest) -> Sequence[EngineInfo]:
    """Those of `engines` that have the variant of `request` in a slot, or all if these are too loaded."""
    if not request.slot:
        return engines
    having = [engine for engine in engines if request.slot in engine.slots]
    return _not_too_loaded(having, engines, request) or engines


def _not_too_loaded(
    preferred: Sequence[EngineInfo], engines: Sequence[EngineInfo], request: RoutingRequest
) -> list[EngineInfo]:
    limit = _GUARD_RATIO * min(work(engine, request) for engine in engines) + _GUARD_SLACK_TOKENS
    return [engine for engine in preferred if work(engine, request) <= limit]


def favourite(engines: Sequence[EngineInfo], key: bytes) -> EngineInfo:
    """The engine that `key` prefers; the same on every frontend."""
    digest = _digest(key)
    return max(engines, key=lambda engine: _score(engine, digest))


def by_preference(engines: Sequence[EngineInfo], key: bytes) -> list[EngineInfo]:
    """All engines, in the order in which `key` prefers them.

    Source: Thaler and Ravishankar 1998, highest random weight.
    """
    digest = _digest(key)
    return sorted(engines, key=lambda engine: _score(engine, digest), reverse=True)


def prefix_hash(prompt_token_ids: Sequence[int]) -> bytes:
    """The key of a prompt: a hash of its first 64 tokens, or of a smaller multiple of 16; empty below 16."""
    num_tokens = min(len(prompt_token_ids), _PREFIX_TOKENS) // _PREFIX_STEP * _PREFIX_STEP
    if not num_tokens:
        return b""
    ids = array("Q", prompt_token_ids[:num_tokens])
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()


def _score(engine: EngineInfo, digest: bytes) -> bytes:
    return hashlib.blake2b(engine.address.encode(), key=digest, digest_size=8).digest()
