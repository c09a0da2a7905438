"""The allowed ids, the biases and the bad words of a request."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.core.extras import Extra


@dataclass(frozen=True, slots=True)
class TokenRules(Extra):
    """allowed: None for all.  bias: (id, addend of its logit), each id once.
    bad_words: sequences whose last id may not follow the others.
    """

    allowed: frozenset[int] | None = None
    bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def rules(self) -> tuple[str, ...]:
        is_set = {"allowed_token_ids": self.allowed is not None, "bad_words": bool(self.bad_words)}
        return tuple(name for name in is_set if is_set[name])


EXTRAS = (TokenRules,)
