"""The interface between the runner and a model, native or of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from engine_svc.model.context import ForwardContext


class Model(Protocol):
    """A decoder over the paged cache."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """Logits [N, V] of the tokens at `logit_rows`, all [T] or [N] int64."""
        ...


@runtime_checkable
class SharedModel(Protocol):
    """A model whose experts are divided over several engines."""

    def take_part(self) -> None:
        """Serve the other engines' tokens with this engine's experts, in a step without tokens of its own."""
        ...


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest logit of each of N rows and its token: [N] fp32, NaN where the row has one, and [N] int64.

    kept: [K, V], the logits of the rows that the caller asked to keep.
    """

    kept: Tensor
    highest: Tensor
    tokens: Tensor


@runtime_checkable
class GreedyModel(Protocol):
    """A model that can find the largest logit of a row without writing the row's logits."""

    def forward_greedy(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        context: ForwardContext,
        kept: Tensor,
    ) -> Largest:
        """Run `forward`, but write only the rows of logits at `kept`, [K] int64, of N."""
        ...


def finds_largest(model: Model) -> TypeGuard[GreedyModel]:
    """Whether a model is a GreedyModel. Asked in every step, and `isinstance` of a protocol takes 5 us."""
    return _is_greedy(type(model))


@cache
def _is_greedy(kind: type[object]) -> bool:
    return issubclass(kind, GreedyModel)
