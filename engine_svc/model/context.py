"""What one forward reads and writes besides its tokens and their hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from triptych_kernels import AttentionBatch


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one attention layer, written. key_cache: [B, G, S, D], value_cache: [B, G, S, E]."""

    group: int  # index of the layer group: layers of a group share block tables
    key_cache: Tensor
    value_cache: Tensor


@dataclass(frozen=True, slots=True)
class EmbeddedTokens:
    """Tokens of a step that come as embeddings; their ids are ignored.

    positions: [K] int64, indices in the step.  rows: [K, hidden], in the model's dtype.
    """

    positions: Tensor
    rows: Tensor


@dataclass(slots=True)
class ForwardContext:
    """One step as attention sees it. `layers` is in the order in which a forward runs them.

    slot_mappings: per group, [T] int64.  attention: per group.  embedded: None where all tokens have ids.
    """

    layers: Sequence[LayerCache]
    slot_mappings: Sequence[Tensor]
    attention: Sequence[AttentionBatch]
    embedded: EmbeddedTokens | None = None

    @property
    def has_ids_alone(self) -> bool:
        """Whether every token of the step comes as its id, as recorded steps need."""
        return self.embedded is None
