"""What attention must know of a step beside the tensors of a layer. Made once a step, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class AttentionBatch:
    """Rows of a step: how many tokens each computes, how long it then is, and where its KV lies.

    block_tables: [R, max_blocks] integers, row r valid up to ceil(total_lengths[r] / block_size) columns.
    query_lengths: [R] int64, at least 1; the step's T tokens are those of row 0, then of row 1, and so on.
    total_lengths: [R] int64, tokens of the row with KV once this step's are written.
    `derived` is where an implementation keeps index tensors that all layers share.
    """

    block_tables: Tensor
    query_lengths: Tensor
    total_lengths: Tensor
    block_size: int
    derived: dict[object, object] = field(default_factory=dict)
