"""What a runner asks of a model, whichever road it runs by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
    """A model of which other engines hold other parts."""

    def take_part(self) -> None:
        """Serve the other engines' tokens with the part that is here, in a step without own ones."""
        ...


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest of N rows of logits, and where: [N] fp32, NaN where a row has any, and [N] int64.

    kept: [K, V], the logits of those rows that were to be kept.
    """

    kept: Tensor
    highest: Tensor
    tokens: Tensor


@runtime_checkable
class GreedyModel(Protocol):
    """A model that need not write logits of which only the largest is asked for."""

    def forward_greedy(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        context: ForwardContext,
        kept: Tensor,
    ) -> Largest:
        """As `forward`, but of the N rows of logits only those at `kept`, [K] int64, are written."""
        ...
