"""Finds the longest prefix of a request that is cached in every group of layers. Knows no clock."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_svc.cache.attention import AttentionKind, CachedBlock, ChunkedLocal, FullAttention
from engine_svc.cache.block_hash import BlockHasher
from engine_svc.cache.block_pool import PLACEHOLDER_BLOCK_ID, BlockPool, JoinedPools, content_key, held_blocks
from engine_svc.core.request import Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached tokens and blocks that a request can take over."""

    num_tokens: int = 0
    block_ids: tuple[list[int], ...] = ()  # per group, with placeholders for blocks never read; () = no hit

    @property
    def held_block_ids(self) -> list[int]:
        """The blocks of all groups without placeholders, in the order of their release."""
        return [block_id for block_ids in self.block_ids for block_id in held_blocks(reversed(block_ids))]


@dataclass(slots=True, eq=False)
class _Lookup:
    """Groups of one kind, which are looked up together: a hit has blocks in all of them."""

    kind: AttentionKind
    groups: list[int] = field(default_factory=list)


class PrefixFinder:
    """Finds hits over groups of several kinds, and decides up to which token blocks are registered.

    A hit ends where a block of every group ends, so its length is a multiple of the least common multiple of
    their block sizes, and content after the last such position is not registered.
    """

    def __init__(
        self,
        pool: BlockPool | JoinedPools,
        hasher: BlockHasher,
        groups: Sequence[AttentionKind],
        *,
        drop_last: bool,
    ) -> None:
        self._pool = pool
        self._hasher = hasher
        self._num_groups = len(groups)
        self._drop_last = drop_last
        self.alignment = math.lcm(*(kind.block_size for kind in groups))
        self._lookups = _lookups(groups)

    def require_exact_ends(self) -> None:
        """Raise ValueError if a hit could end inside a local chunk without the beginning of that chunk.

        Also if it could end without the state at its end.
        """
        for lookup in self._lookups:
            kind = lookup.kind
            if isinstance(kind, ChunkedLocal) and (self._drop_last or kind.chunk % self.alignment):
                raise ValueError(
                    f"chunk is {kind.chunk}: with prefix caching it must be a multiple of {self.alignment} "
                    "tokens, and no matched block can be dropped"
                )
            if self._drop_last and kind.num_unshared_steps:
                raise ValueError("a layer has a state: with prefix caching no matched block can be dropped")

    def num_cacheable_tokens(self, num_tokens: int, block_size: int) -> int:
        """How many of the first `num_tokens` tokens a hit could cover, in a group of this block size."""
        aligned = num_tokens // self.alignment * self.alignment
        if not self._drop_last or not aligned:
            return aligned
        # The block that a hit leaves out has to be cached as well.
        return min(num_tokens, aligned + block_size)

    def find(self, request: Request) -> PrefixHit:
        """The longest hit that leaves a token to compute. Changes nothing but the hashes of the request.

        Every kind in turn accepts a candidate length or shortens it, until none does.
        """
        self._hasher.extend(request)
        num_hashed = len(request.block_hashes) * self._hasher.block_size
        length = request.num_tokens - 1
        request.parts_at = 0
        hits: dict[_Lookup, list[CachedBlock | None]] = {}
        dropped: set[_Lookup] = set()
        while True:
            candidate = length
            for lookup in self._lookups:
                block_size = lookup.kind.block_size
                if lookup.kind.num_unshared_steps and lookup not in hits and hits:
                    request.parts_at = candidate
                if lookup in hits and isinstance(lookup.kind, FullAttention):
                    # Any prefix of its hit is a hit as well.
                    continue
                drops = self._drop_last and lookup not in dropped
                limit = candidate
                if drops and self._num_groups > 1:
                    # One block more, so that the hit without the last block can be as long as the candidate.
                    limit = min(candidate + block_size, num_hashed)
                hit = lookup.kind.longest_hit(
                    functools.partial(self._find_block, request, lookup),
                    limit // block_size,
                    self.alignment,
                    drop_last=drops,
                )
                num_tokens = len(hit) * block_size
                if drops:
                    dropped.add(lookup)
                elif num_tokens < candidate:
                    dropped.clear()
                hits[lookup] = hit
                candidate = num_tokens
            if candidate >= length:
                return self._as_hit(hits, length)
            length = candidate

    def _find_block(self, request: Request, lookup: _Lookup, index: int) -> CachedBlock | None:
        num_hashes = lookup.kind.block_size // self._hasher.block_size
        block_hash = request.block_hashes[(index + 1) * num_hashes - 1]
        block_ids = []
        for group in lookup.groups:
            block_id = self._pool.find(content_key(block_hash, group))
            if block_id is None:
                return None
            block_ids.append(block_id)
        return block_ids

    def _as_hit(self, hits: dict[_Lookup, list[CachedBlock | None]], length: int) -> PrefixHit:
        if not length:
            return PrefixHit()
        tables: list[list[int]] = [[] for _ in range(self._num_groups)]
        for lookup, hit in hits.items():
            for index, group in enumerate(lookup.groups):
                tables[group] = [
                    PLACEHOLDER_BLOCK_ID if entry is None else entry[index]
                    for entry in hit[: length // lookup.kind.block_size]
                ]
        return PrefixHit(length, tuple(tables))


def _lookups(groups: Sequence[AttentionKind]) -> list[_Lookup]:
    by_kind: dict[AttentionKind, _Lookup] = {}
    for index, kind in enumerate(groups):
        by_kind.setdefault(kind, _Lookup(kind)).groups.append(index)
    # Full attention first: it shortens the candidate most cheaply, and is looked up only once. States last.
    return sorted(
        by_kind.values(),
        key=lambda lookup: (lookup.kind.num_unshared_steps > 0, not isinstance(lookup.kind, FullAttention)),
    )
