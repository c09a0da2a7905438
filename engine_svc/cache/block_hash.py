"""Chained hashes of full blocks: equal hashes mean equal content from the first token on, in any engine.

Knows no pool and no policy.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from engine_svc.core.request import ContentSpan, Request

_DOMAIN = b"triptych.block.v1"


class BlockHasher:
    """Computes block hashes from one fleet-wide root: the model's fingerprint, the salt and extra keys.

    Two engines with the same fingerprint and block size compute the same hashes for the same prompt, so that
    events, transfers and routing can refer to blocks by hash. The hashed bytes are canonical: the hash of the
    block before, the tokens as little-endian 32-bit numbers, then the keys of the content spans in the block.
    """

    def __init__(self, block_size: int, fingerprint: bytes = b"") -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, must be at least 1")
        self.block_size = block_size
        self._fingerprint = fingerprint
        self._tokens = struct.Struct(f"<{block_size}I")

    def root(self, cache_salt: str = "", extra_keys: Iterable[str] = ()) -> bytes:
        """The parent hash of the first block of every request with this salt and these keys."""
        parts = (_DOMAIN, self._fingerprint, cache_salt.encode(), *(key.encode() for key in extra_keys))
        # Lengths are included, so that bytes cannot move from one part to the next.
        return hashlib.sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()

    def extend(self, request: Request) -> None:
        """Extend `request.block_hashes` to all blocks that its known tokens fill."""
        hashes, token_ids, block_size = request.block_hashes, request.token_ids, self.block_size
        first, end = len(hashes), len(token_ids) // block_size
        if first >= end:
            return
        parent = hashes[-1] if hashes else self.root(request.cache_salt, request.extra_keys)
        sha256, pack, spans = hashlib.sha256, self._tokens.pack, request.spans
        num_passed = 0
        for start in range(first * block_size, end * block_size, block_size):
            content = parent + pack(*token_ids[start : start + block_size])
            if spans:
                # A long prompt may have a span in each block: spans before the block are skipped once.
                while num_passed < len(spans) and _end(spans[num_passed]) <= start:
                    num_passed += 1
                content += _span_bytes(spans, num_passed, start, start + block_size)
            parent = sha256(content).digest()
            hashes.append(parent)


def span_keys(spans: Iterable[ContentSpan], start: int, end: int) -> list[tuple[str, int]]:
    """The keys of spans that overlap the tokens from `start` to `end`, each with the offset of its span.

    Offsets count from `start`; that of a span that began in an earlier block is negative.
    """
    return [
        (span.key, span.start - start)
        for span in spans
        if span.start < end and span.start + span.num_tokens > start
    ]


def _end(span: ContentSpan) -> int:
    return span.start + span.num_tokens


def _span_bytes(spans: Sequence[ContentSpan], first: int, start: int, end: int) -> bytes:
    parts, stop = [], first
    while stop < len(spans) and spans[stop].start < end:
        stop += 1
    for key, offset in span_keys(spans[first:stop], start, end):
        encoded = key.encode()
        parts.append(struct.pack("<Qq", len(encoded), offset) + encoded)
    return b"".join(parts)
