"""A model whose KV and tokens are digests of all that they depend on; what it says needs no engine."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from engine_svc.core.request import ContentSpan, Request

EOS_TOKEN_ID = 2
STOP_TOKEN_ID = 5
# Few, so that outputs end, repeat themselves and are guessed by accident.
NUM_OUTPUT_TOKENS = 14
NUM_PROMPT_TOKENS = 40

_MODULUS = (1 << 61) - 1
_FACTOR = 0x1A36E2EB1C432CA5
_MIXER = 0x0FB5AF3B2C7D4E91


def link(digest: int, content: int) -> int:
    """What a slot holds: a digest of the content at its place and of all before it."""
    return (digest * _FACTOR + content + 2) % _MODULUS


def next_token(digest: int) -> int:
    """The token that follows a sequence with this digest."""
    return (digest * _MIXER % _MODULUS >> 24) % NUM_OUTPUT_TOKENS


@dataclass(frozen=True, slots=True)
class Identity:
    """What KV depends on beside the tokens before it."""

    root: int
    spans: tuple[ContentSpan, ...]
    num_encoder_tokens: int = 0

    def contents(self, token_ids: Sequence[int], start: int) -> list[int]:
        """What stands at the places from `start` on: the token, and the part of a span that it stands for."""
        contents = list(token_ids[start:])
        for span in self.spans:
            key = _number(span.key)
            for place in range(max(span.start, start), min(span.start + span.num_tokens, len(token_ids))):
                contents[place - start] += (key << 8) + ((place - span.start + 1) << 42)
        return contents

    def encoder_digests(self) -> list[int]:
        return [link(self.root, -3 - place) for place in range(self.num_encoder_tokens)]

    def extend(self, digests: list[int], token_ids: Sequence[int]) -> None:
        """Bring `digests`, one a place, up to all tokens."""
        start = len(digests)
        digest = digests[-1] if start else self.root
        # The same as `link`, without a call for each token.
        for content in self.contents(token_ids, start) if self.spans else token_ids[start:]:
            digest = (digest * _FACTOR + content + 2) % _MODULUS
            digests.append(digest)


def identity_of(request: Request) -> Identity:
    """The identity of a request: no two tenants, and no two sets of keys, have any KV in common."""
    root = _root(request.cache_salt, request.extra_keys)
    return Identity(root, request.spans, request.num_encoder_tokens)


@cache
def _root(cache_salt: str, extra_keys: tuple[str, ...]) -> int:
    return _number(repr((cache_salt, extra_keys))) * _MIXER % _MODULUS


@cache
def _number(text: str) -> int:
    return zlib.crc32(text.encode())
