"""What the attention layers of one forward read and write beside their hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from triptych_kernels import AttentionBatch


@dataclass(slots=True)
class ForwardContext:
    """One step as attention sees it. Layer n uses `key_caches[n]` and `value_caches[n]`.

    slot_mapping: [T] int64.  key_caches: [G, B, S, D] each, value_caches: [G, B, S, E] each; written.
    """

    slot_mapping: Tensor
    attention: AttentionBatch
    key_caches: Sequence[Tensor]
    value_caches: Sequence[Tensor]
