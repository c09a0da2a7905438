"""What a runner asks of a model, whichever road it runs by."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine_svc.model.context import ForwardContext


class Model(Protocol):
    """A decoder over the paged cache."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """Logits [N, V] of the tokens at `logit_rows`, all [T] or [N] int64."""
        ...
