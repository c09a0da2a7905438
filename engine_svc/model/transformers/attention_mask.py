"""Finds out from a model's attention masks which tokens each token attends to. Knows no model.

transformers describes a mask by a function of two positions. The function is evaluated at positions far
beyond any sample, so a window or a chunk of thousands of tokens is found exactly, and a mask that is neither
causal nor one of these is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Larger than the distance between any two tokens of a sequence: a window of this length is no window.
_FAR = 1 << 20

# (batch, head, query position, key position) -> whether the key is visible, all broadcast.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Sight(NamedTuple):
    """What a token sees, as KVShape says it; it is not limited by both."""

    window: int | None = None
    chunk: int | None = None

    def first_seen(self, query: int) -> int:
        if self.chunk is not None:
            return query // self.chunk * self.chunk
        return 0 if self.window is None else max(0, query - self.window + 1)


class OddMask(ValueError):
    """A mask under which a token attends to other tokens than all, the last few or its chunk's before it."""


@dataclass(frozen=True, slots=True)
class _Made:
    mask: Tensor
    function: MaskFunction
    window: int | None  # the window that transformers passes with the function


class MaskBook:
    """Makes the masks of one forward, as transformers would, and remembers the function behind each."""

    def __init__(self) -> None:
        self._made: list[_Made] = []

    def make_mask(
        self,
        *,
        q_length: int,
        kv_length: int,
        mask_function: MaskFunction,
        local_size: int | None = None,
        device: torch.device | str = "cpu",
        **_: object,
    ) -> Tensor:
        """[1, 1, q_length, kv_length] bool, True where visible. The arguments are those of transformers."""
        queries = torch.arange(q_length, device=device)[:, None]
        try:
            mask = _evaluate(mask_function, queries, torch.arange(kv_length, device=device)).clone()
        except (RuntimeError, IndexError) as error:
            raise OddMask(f"has a mask that cannot be evaluated by position: {error}") from error
        self._made.append(_Made(mask, mask_function, local_size))
        return mask

    def sight_of(self, mask: Tensor) -> Sight:
        """What a token sees under a mask made here.

        Raises OddMask for any other mask.
        """
        for made in self._made:
            # A layer may get a slice or a view of the mask.
            if made.mask.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr():
                return _sight(made)
        raise OddMask("adds a mask of its own to attention")


def _sight(made: _Made) -> Sight:
    try:
        return _far_sight(made.function, made.mask.device)
    except IndexError:
        # The function looks positions of the sample up, e.g. whether they are text, which all of them are.
        return Sight(window=_near_window(made))


def _near_window(made: _Made) -> int | None:
    """The window that transformers passes, if the mask of the sample agrees with it."""
    num_queries, num_keys = made.mask.shape[-2:]
    distance = torch.arange(num_queries)[:, None] - torch.arange(num_keys)
    expected = (distance >= 0) & (distance < (made.window or num_keys))
    if not torch.equal(made.mask[0, 0].cpu(), expected):
        raise OddMask("lets tokens see other tokens than themselves and the ones before them")
    return made.window


def _far_sight(function: MaskFunction, device: torch.device) -> Sight:
    """Tells windows from chunks at the first token that the last one sees: the one before it sees as many
    tokens as a window has, or all of its chunk.
    """
    last = _FAR - 1
    first = _FAR - int(_seen_from(function, last, device).sum())
    if first <= 0:
        candidates = [Sight()]
    else:
        chunk = int(_seen_from(function, first - 1, device).sum())
        candidates = [Sight(window=_FAR - first), *([Sight(chunk=chunk)] if chunk else [])]
    queries = {0, 1, first - 1, first, last // 2, last // 2 + 1, last - 1, last}
    for sight in candidates:
        odd = _unlike(function, sight, queries, device)
        if odd is None:
            return sight
    raise OddMask(f"lets token {odd} see other tokens than itself and the ones before it")


def _unlike(
    function: MaskFunction, sight: Sight, queries: Collection[int], device: torch.device
) -> int | None:
    """One of the queries, and of those around the first limit, that sees other tokens."""
    limit = sight.window or sight.chunk or 0
    for query in sorted({*queries, limit - 1, limit, limit + 1}):
        if 0 <= query < _FAR:
            seen = _seen_from(function, query, device)
            first = sight.first_seen(query)
            if not (seen[first : query + 1].all() and int(seen.sum()) == query + 1 - first):
                return query
    return None


def _seen_from(function: MaskFunction, query: int, device: torch.device) -> Tensor:
    """[query + 2] bool, for keys up to the position after the query's."""
    positions = torch.arange(query + 2, device=device)
    return _evaluate(function, torch.full((1, 1), query, device=device), positions)[0, 0, 0]


def _evaluate(function: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    """[1, 1, Q, K] for queries [Q, 1] and keys [K]."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=keys.device)
    seen = function(zero, zero, queries[None, None], keys[None, None, None])
    return seen.expand(1, 1, queries.shape[0], keys.shape[0])
