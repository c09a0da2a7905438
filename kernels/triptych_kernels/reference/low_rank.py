"""Low-rank additions to projections, different ones for each token, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych_kernels.ops import LowRankMatrices


@dataclass(frozen=True, slots=True)
class PlainMatrices:
    """A and B as they are. down: [rank, in_features].  up: [out_features, rank]."""

    down: Tensor
    up: Tensor
    scale: float

    @property
    def in_features(self) -> int:
        return self.down.shape[1]

    @property
    def out_features(self) -> int:
        return self.up.shape[0]

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.down.dtype

    @property
    def num_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, slots=True)
class LowRankShape:
    """What a projection's additions must fit."""

    in_features: int
    widths: tuple[int, ...]
    num_slots: int
    max_rank: int
    dtype: torch.dtype

    def check_slot(self, slot: int) -> None:
        """IndexError for a slot that there is not."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} is not below {self.num_slots}")

    def check_put(self, slot: int, matrices: Sequence[LowRankMatrices | None]) -> None:
        """IndexError or ValueError if these cannot be in the slot."""
        self.check_slot(slot)
        if len(matrices) != len(self.widths):
            raise ValueError(f"there are matrices of {len(matrices)} parts for {len(self.widths)}")
        for part, width in zip(matrices, self.widths, strict=True):
            if part is None:
                continue
            if (part.in_features, part.out_features) != (self.in_features, width):
                raise ValueError(
                    f"matrices take {part.in_features} inputs to {part.out_features} outputs, "
                    f"the projection {self.in_features} to {width}"
                )
            if part.rank > self.max_rank:
                raise ValueError(f"the rank is {part.rank}, at most {self.max_rank} fits")
            if part.dtype is not self.dtype:
                raise ValueError(f"matrices are {part.dtype}, not {self.dtype}")

    def check_call(self, x: Tensor, slots: Tensor) -> None:
        """ValueError if x is not [T, in_features] with rows contiguous, or slots not [T] int64."""
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype is not self.dtype:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}: expected {self.dtype} [T, {self.in_features}]"
            )
        if x.stride(1) != 1 and x.shape[1] > 1:
            raise ValueError(f"the columns of x must be contiguous; their stride is {x.stride(1)}")
        if slots.shape != x.shape[:1] or slots.dtype is not torch.int64:
            raise ValueError(f"slots are {slots.dtype} {tuple(slots.shape)} for {x.shape[0]} tokens")


def check_matrices(down: Tensor, up: Tensor) -> None:
    """ValueError unless A [rank, in_features] and B [out_features, rank] belong together."""
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1] or not (down.numel() and up.numel()):
        raise ValueError(f"A is {tuple(down.shape)} and B {tuple(up.shape)}: expected [r, K] and [N, r]")
    if down.dtype is not up.dtype:
        raise ValueError(f"A is {down.dtype} and B {up.dtype}")


class _PlainLowRank:
    """See ops.LowRank."""

    num_bytes = 0

    def __init__(self, shape: LowRankShape) -> None:
        self.in_features, self.out_features = shape.in_features, sum(shape.widths)
        self._shape = shape
        self._matrices: dict[int, Sequence[PlainMatrices | None]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._matrices

    def put(self, slot: int, matrices: Sequence[LowRankMatrices | None]) -> None:
        self._shape.check_put(slot, matrices)
        self._matrices[slot] = [_plain(part) for part in matrices]

    def clear(self, slot: int) -> None:
        self._shape.check_slot(slot)
        self._matrices.pop(slot, None)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        shape = self._shape
        shape.check_call(x, slots)
        if bool((slots >= shape.num_slots).any()):
            raise IndexError(f"a low-rank slot is not below {shape.num_slots}")
        out = x.new_zeros(x.shape[0], self.out_features, dtype=torch.float32)
        for slot, matrices in self._matrices.items():
            tokens = (slots == slot).nonzero()[:, 0]
            rows = x[tokens].float()
            for part, columns in zip(matrices, out.split(list(shape.widths), dim=1), strict=True):
                if part is not None and len(tokens):
                    shrunk = rows @ part.down.float().T * part.scale
                    columns[tokens] = shrunk @ part.up.float().T
        return out


def _plain(part: LowRankMatrices | None) -> PlainMatrices | None:
    if part is not None and not isinstance(part, PlainMatrices):
        raise ValueError(f"matrices are {type(part).__name__}, packed for another device")
    return part


def pack_low_rank(down: Tensor, up: Tensor, scale: float) -> PlainMatrices:
    """See ops.Ops.pack_low_rank."""
    check_matrices(down, up)
    return PlainMatrices(down.detach().contiguous(), up.detach().contiguous(), scale)


def make_low_rank(
    in_features: int,
    widths: Sequence[int],
    num_slots: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _PlainLowRank:
    """See ops.Ops.make_low_rank."""
    return _PlainLowRank(LowRankShape(in_features, tuple(widths), num_slots, max_rank, dtype))
