"""Weights as checkpoints store them: codes of a few bits, and what makes numbers of them, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Computed in one piece: each takes 12 bytes until it is rounded.
_NUMBERS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """[N, K] of (values[code] - zero) * scale - minimum, computed in fp32, rounded to `dtype`.

    Scale, zero and minimum are those of the row, and of the column's group.
    """

    codes: Tensor  # [N, K] uint8, each below 2 ** bits
    bits: int  # 1 to 8
    values: Tensor  # [2 ** bits] fp32: the number that a code stands for
    scales: Tensor  # [N, G] fp32, as zeros and minima
    group_size: int  # columns of a group, of which the last may have fewer
    dtype: torch.dtype  # of the rows that it is multiplied with, and of `dequantize`
    zeros: Tensor | None = None
    minima: Tensor | None = None
    groups: Tensor | None = None  # [K] int64: the group of each column; None: k // group_size

    def __post_init__(self) -> None:
        num_rows, num_columns = self.codes.shape
        num_groups = self.scales.shape[1]
        for name, vector in (("scales", self.scales), ("zeros", self.zeros), ("minima", self.minima)):
            if vector is not None and vector.shape != (num_rows, num_groups):
                raise ValueError(
                    f"{name} have shape {tuple(vector.shape)}, expected {(num_rows, num_groups)}"
                )
        if self.values.shape != (1 << self.bits,):
            raise ValueError(f"there are {len(self.values)} values of {self.bits} bits")
        if self.groups is None:
            if num_groups != -(-num_columns // self.group_size):
                raise ValueError(
                    f"{num_columns} columns in groups of {self.group_size} have {num_groups} scales a row"
                )
        elif self.groups.shape != (num_columns,):
            raise ValueError(f"there are groups of {tuple(self.groups.shape)} columns, of {num_columns}")
        elif num_columns and not 0 <= int(self.groups.min()) <= int(self.groups.max()) < num_groups:
            raise ValueError(f"a column is of group {int(self.groups.max())}, there are {num_groups}")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def numel(self) -> int:
        return self.codes.numel()

    def dequantize(self) -> Tensor:
        """[N, K] in `dtype`."""
        num_rows, num_columns = self.shape
        step = max(1, _NUMBERS_AT_ONCE // max(1, num_columns))
        numbers = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for first in range(0, num_rows, step):
            end = min(first + step, num_rows)
            numbers[first:end] = self.rows(first, end)._numbers()
        return numbers

    def rows(self, first: int, end: int) -> QuantizedWeight:
        """Rows first to end - 1, in the same memory."""
        return self.at_rows(slice(first, end))

    def at_rows(self, rows: slice | Tensor) -> QuantizedWeight:
        """Rows by their indices [R] int64, or a slice of them, which are in the same memory."""
        return replace(
            self,
            codes=self.codes[rows],
            scales=self.scales[rows],
            zeros=None if self.zeros is None else self.zeros[rows],
            minima=None if self.minima is None else self.minima[rows],
        )

    def columns(self, first: int, end: int) -> QuantizedWeight:
        """Columns first to end - 1, which may begin or end within a group, in the same memory."""
        size = self.group_size
        if self.groups is not None or first % size or (end % size and end != self.shape[1]):
            return replace(self, codes=self.codes[:, first:end], groups=self._column_groups()[first:end])
        groups = slice(first // size, -(-end // size))
        return replace(
            self,
            codes=self.codes[:, first:end],
            scales=self.scales[:, groups],
            zeros=None if self.zeros is None else self.zeros[:, groups],
            minima=None if self.minima is None else self.minima[:, groups],
        )

    def to(self, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> QuantizedWeight:
        """The same weight on a device, for rows of a dtype."""
        tensors = ("codes", "values", "scales", "zeros", "minima", "groups")
        moved = {name: tensor.to(device) for name in tensors if (tensor := getattr(self, name)) is not None}
        return replace(self, dtype=dtype or self.dtype, **(moved if device is not None else {}))

    def _column_groups(self) -> Tensor:
        if self.groups is not None:
            return self.groups
        return torch.arange(self.shape[1], device=self.device) // self.group_size

    def _numbers(self) -> Tensor:
        """[N, K] fp32."""
        # Several times as fast as indexing by the codes.
        numbers = self.values.index_select(0, self.codes.reshape(-1).int()).view(self.shape)
        # [N, K], or [N, G, columns of a group]: the same numbers.
        parts, of_columns = numbers, self._of_columns
        if self.groups is None and numbers.shape[1] % self.group_size == 0:
            parts = numbers.view(numbers.shape[0], -1, self.group_size)
            of_columns = _of_groups
        if self.zeros is not None:
            parts -= of_columns(self.zeros)
        parts *= of_columns(self.scales)
        if self.minima is not None:
            parts -= of_columns(self.minima)
        return numbers

    def _of_columns(self, numbers: Tensor) -> Tensor:
        """[N, G] as [N, K]."""
        return numbers[:, self._column_groups()]


def _of_groups(numbers: Tensor) -> Tensor:
    """[N, G] as [N, G, 1]."""
    return numbers[:, :, None]


@dataclass(frozen=True, slots=True, eq=False)
class JoinedWeight:
    """Weights of different kinds, one below the other: [N, K] of parts [N_i, K]."""

    parts: tuple[Tensor | QuantizedWeight, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)

    def dequantize(self) -> Tensor:
        """[N, K] in the dtype of the parts."""
        return torch.cat([as_tensor(part) for part in self.parts])


Weight = Tensor | QuantizedWeight | JoinedWeight
ExpertWeights = Tensor | Sequence[Weight]  # of E experts: [E, N, K], or as many weights [N, K]


def as_tensor(weight: Weight) -> Tensor:
    """The numbers of a weight, in its dtype."""
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def stacked(weights: ExpertWeights) -> Tensor:
    """[E, N, K], their numbers."""
    return weights if isinstance(weights, Tensor) else torch.stack([as_tensor(weight) for weight in weights])


def join_rows(weights: Sequence[Tensor | QuantizedWeight]) -> Weight:
    """The weights one below the other, as one of their kind where they are all of the same."""
    if len(weights) == 1:
        return weights[0]
    if all(isinstance(weight, Tensor) for weight in weights):
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    first = weights[0]
    if not isinstance(first, QuantizedWeight) or not all(_is_like(first, weight) for weight in weights):
        return JoinedWeight(tuple(weights))
    alike = [weight for weight in weights if isinstance(weight, QuantizedWeight)]

    def joined(vectors: Sequence[Tensor | None]) -> Tensor | None:
        present = [vector for vector in vectors if vector is not None]
        return torch.cat(present) if present else None

    return replace(
        first,
        codes=torch.cat([weight.codes for weight in alike]),
        scales=torch.cat([weight.scales for weight in alike]),
        zeros=joined([weight.zeros for weight in alike]),
        minima=joined([weight.minima for weight in alike]),
    )


def _is_like(first: QuantizedWeight, other: Tensor | QuantizedWeight) -> bool:
    """Whether the two differ in their rows alone."""
    return (
        isinstance(other, QuantizedWeight)
        and (first.bits, first.group_size, first.dtype) == (other.bits, other.group_size, other.dtype)
        and torch.equal(first.values, other.values)
        and (first.zeros is None) == (other.zeros is None)
        and (first.minima is None) == (other.minima is None)
        and (first.groups is None) == (other.groups is None)
        and (first.groups is None or (other.groups is not None and torch.equal(first.groups, other.groups)))
    )
