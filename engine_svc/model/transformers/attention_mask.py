"""Finds out from a model's attention masks which tokens each token attends to. Knows no model.

transformers describes a mask by a function of two positions. The function is evaluated at positions far
beyond any sample, so a window of thousands of tokens is found exactly, and a mask that is neither causal nor
a sliding window is detected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Larger than the distance between any two tokens of a sequence: a window of this length is no window.
_FAR = 1 << 20

# (batch, head, query position, key position) -> whether the key is visible, all broadcast.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class OddMask(ValueError):
    """A mask under which a token attends to something other than all, or the last few, tokens before it."""


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

    def window_of(self, mask: Tensor) -> int | None:
        """Number of tokens a token sees under a mask made here, itself included; None: all before it.

        Raises OddMask for any other mask.
        """
        for made in self._made:
            # A layer may get a slice or a view of the mask.
            if made.mask.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr():
                return _window(made)
        raise OddMask("adds a mask of its own to attention")


def _window(made: _Made) -> int | None:
    try:
        return _far_window(made.function, made.mask.device)
    except IndexError:
        # The function looks positions of the sample up, e.g. whether they are text, which all of them are.
        return _near_window(made)


def _near_window(made: _Made) -> int | None:
    """The window that transformers passes, if the mask of the sample agrees with it."""
    num_queries, num_keys = made.mask.shape[-2:]
    distance = torch.arange(num_queries)[:, None] - torch.arange(num_keys)
    expected = (distance >= 0) & (distance < (made.window or num_keys))
    if not torch.equal(made.mask[0, 0].cpu(), expected):
        raise OddMask("lets tokens see other tokens than themselves and the ones before them")
    return made.window


def _far_window(function: MaskFunction, device: torch.device) -> int | None:
    last = _FAR - 1
    num_seen = int(_seen_from(function, last, device).sum())
    queries = {0, 1, num_seen - 1, num_seen, num_seen + 1, last // 2, last - 1, last}
    for query in sorted(query for query in queries if 0 <= query <= last):
        seen = _seen_from(function, query, device)
        first = max(0, query - num_seen + 1)
        if not (seen[first : query + 1].all() and int(seen.sum()) == query + 1 - first):
            raise OddMask(f"lets token {query} see other tokens than itself and the ones before it")
    return None if num_seen == _FAR else num_seen


def _seen_from(function: MaskFunction, query: int, device: torch.device) -> Tensor:
    """[query + 2] bool, for keys up to the position after the query's."""
    positions = torch.arange(query + 2, device=device)
    return _evaluate(function, torch.full((1, 1), query, device=device), positions)[0, 0, 0]


def _evaluate(function: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    """[1, 1, Q, K] for queries [Q, 1] and keys [K]."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=keys.device)
    seen = function(zero, zero, queries[None, None], keys[None, None, None])
    return seen.expand(1, 1, queries.shape[0], keys.shape[0])
