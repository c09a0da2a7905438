"""What the attention layers of one forward read and write beside their hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from triptych_kernels import AttentionBatch


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where one attention layer keeps its KV. key_cache: [G, B, S, D], value_cache: [G, B, S, E]; written."""

    group: int  # of layers that share block tables: an index of the context's columns
    key_cache: Tensor
    value_cache: Tensor


@dataclass(slots=True)
class ForwardContext:
    """One step as attention sees it. `layers` is in the order in which a forward runs them.

    slot_mappings: per group, [T] int64.  attention: per group.
    """

    layers: Sequence[LayerCache]
    slot_mappings: Sequence[Tensor]
    attention: Sequence[AttentionBatch]
