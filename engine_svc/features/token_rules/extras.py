"""What the feature attaches to requests and results."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRules:
    """allowed: None for all.  bias: (id, addend of its logit), each id once.
    bad_words: sequences whose last id may not follow the others.
    """

    allowed: frozenset[int] | None = None
    bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def rules(self) -> tuple[str, ...]:
        found = {"allowed_token_ids": self.allowed is not None, "bad_words": bool(self.bad_words)}
        return tuple(name for name, is_set in found.items() if is_set)

    def encode(self) -> bytes:
        allowed = None if self.allowed is None else sorted(self.allowed)
        return json.dumps([allowed, self.bias, self.bad_words], separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> TokenRules:
        allowed, bias, bad_words = json.loads(data)
        return cls(
            None if allowed is None else frozenset(allowed),
            tuple((token_id, amount) for token_id, amount in bias),
            tuple(tuple(word) for word in bad_words),
        )


EXTRAS = (TokenRules,)
