"""What the runner's side asks of the encoder beside a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor


class ItemEncoder(Protocol):
    """Computes the embeddings of one item, with the same bits whatever else is computed."""

    def encode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N, hidden], in the model's dtype, of the inputs that EncoderSpec names, on the model's device."""
        ...


@runtime_checkable
class EncodingModel(Protocol):
    """A decoder that may have an encoder beside it. None: it has none, or an earlier stage has it."""

    item_encoder: ItemEncoder | None
