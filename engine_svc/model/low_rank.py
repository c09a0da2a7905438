"""Low-rank additions to a model's weights: which take them, and the share of this rank.

An adapter adds B A to a weight, with A [rank, inputs] and B [outputs, rank]. Each token gets the additions of
its slot, see `ForwardContext.low_rank_slots`. Knows no files and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels import Linear, Ops


@dataclass(frozen=True, slots=True)
class ProjectionPart:
    """The share of a weight [out_features, in_features] that stands in one projection of this rank.

    name: of its module, as in the checkpoint.
    """

    name: str
    out_features: int
    in_features: int
    outputs: slice
    inputs: slice


class Additions(Protocol):
    """What is added to one projection, by slot; `LowRank` of the ops, or to an embedding."""

    def put(self, slot: int, matrices: Sequence[Any]) -> None:
        """Use these in the slot from now on, for each part of the projection or None."""
        ...

    def clear(self, slot: int) -> None: ...


# Lays out A [rank, inputs] and B [outputs, rank], of the whole weight, for this rank. The last is a factor.
Pack = Callable[[Tensor, Tensor, float], Any]


@dataclass(frozen=True, slots=True)
class LowRankTarget:
    """Where a part of a weight is in this rank: the projection with this index, and in it the part."""

    part: ProjectionPart
    projection: int
    index: int
    pack: Pack


@dataclass(frozen=True, slots=True)
class LowRankTargets:
    """All of a model. num_parts: of each projection.  by_name: those of a weight by the module's name."""

    additions: tuple[Additions, ...]
    num_parts: tuple[int, ...]
    by_name: Mapping[str, Sequence[LowRankTarget]]


@runtime_checkable
class LowRankModel(Protocol):
    """A model whose projections take additions."""

    def enable_low_rank(self, num_slots: int, max_rank: int) -> LowRankTargets:
        """Make room for `num_slots` adapters of at most this rank; returns the weights of this rank."""
        ...


def make_targets(additions: Sequence[tuple[Additions, Sequence[ProjectionPart], Pack]]) -> LowRankTargets:
    """The targets of projections: what is added to each, its parts, and how their matrices are packed."""
    by_name: dict[str, list[LowRankTarget]] = {}
    for projection, (_, parts, pack) in enumerate(additions):
        for index, part in enumerate(parts):
            by_name.setdefault(part.name, []).append(LowRankTarget(part, projection, index, pack))
    return LowRankTargets(
        tuple(each for each, _, _ in additions), tuple(len(parts) for _, parts, _ in additions), by_name
    )


@dataclass(frozen=True, slots=True)
class EmbeddingMatrices:
    """table: [V, rank], already scaled.  up: from there to the hidden size."""

    table: Tensor
    up: Linear

    @property
    def num_bytes(self) -> int:
        return self.table.nbytes + self.up.num_bytes


class EmbeddingAdditions:
    """Additions to a table of embeddings; whole on each rank."""

    def __init__(self) -> None:
        self._matrices: dict[int, EmbeddingMatrices] = {}

    def put(self, slot: int, matrices: Sequence[EmbeddingMatrices | None]) -> None:
        self._matrices.pop(slot, None)
        if matrices[0] is not None:
            self._matrices[slot] = matrices[0]

    def clear(self, slot: int) -> None:
        self._matrices.pop(slot, None)

    def add(self, x: Tensor, token_ids: Tensor, slots: Tensor) -> None:
        """x: [T, hidden], written.  token_ids, slots: [T] int64."""
        for slot, matrices in self._matrices.items():
            rows = (slots == slot).nonzero()[:, 0]
            if len(rows):
                x.index_add_(0, rows, matrices.up(F.embedding(token_ids[rows], matrices.table)).to(x.dtype))


def pack_embedding(
    ops: Ops, device: torch.device, down: Tensor, up: Tensor, scale: float
) -> EmbeddingMatrices:
    """device: of the embeddings.  down: [rank, V], up: [hidden, rank], both in the dtype of the model."""
    table = (down.t().float() * scale).to(down.dtype).contiguous()
    return EmbeddingMatrices(table.to(device), ops.pack_linear(up.to(device)))
