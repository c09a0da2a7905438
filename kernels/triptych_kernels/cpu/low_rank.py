"""Low-rank additions by native kernels: a rank for each slot, the same bits for a row in every batch.

Matrices are laid out once; a slot is an entry of a table of addresses, which low_rank.h reads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels.cpu.loader import Isa
from triptych_kernels.cpu.memory import LARGE_PAGE_BYTES
from triptych_kernels.cpu.panel_memory import PanelMemory
from triptych_kernels.ops import LowRank, LowRankMatrices
from triptych_kernels.reference import REFERENCE
from triptych_kernels.reference.low_rank import LowRankShape, check_matrices

_DTYPES = (torch.bfloat16, torch.float32)
_LANES = 16
_LANES_STEP = 4  # that the lanes of the last ranks are padded to
_UNIT_BYTES = 4  # of a lane: a pair of bf16, or one fp32
_VECTOR_BYTES = _LANES * _UNIT_BYTES
_ENTRY = 4  # numbers of an entry of the table

# In chunks of one large page, so that matrices keep little memory of others that are gone.
_memory = PanelMemory(LARGE_PAGE_BYTES)


class NativeMatrices:
    """A and B as lanes of 32 bits, see low_rank.h."""

    __slots__ = ("_memory", "dtype", "entry", "in_features", "num_bytes", "out_features", "rank")

    def __init__(self, down: Tensor, up: Tensor, scale: float) -> None:
        (self.rank, self.in_features), (self.out_features, _) = down.shape, up.shape
        self.dtype = down.dtype
        units = _units(down)
        lanes = [units[first : first + _LANES] for first in range(0, self.rank, _LANES)]
        lanes[-1] = F.pad(lanes[-1], (0, 0, 0, -len(lanes[-1]) % _LANES_STEP))
        shrinking = torch.cat([group.T.flatten() for group in lanes])
        columns = F.pad(up, (0, 0, 0, -self.out_features % _LANES))
        expanding = _units(columns).unflatten(0, (-1, _LANES)).transpose(1, 2).flatten()
        # The last unit of A is read as a whole vector.
        start = shrinking.nbytes + -shrinking.nbytes % _VECTOR_BYTES
        self.num_bytes = start + expanding.nbytes + _VECTOR_BYTES
        self._memory = _memory.take(self.num_bytes)
        self._memory[shrinking.nbytes : start] = 0
        self._memory[: shrinking.nbytes].view(torch.int32).copy_(shrinking)
        self._memory[start : start + expanding.nbytes].view(torch.int32).copy_(expanding)
        self._memory[start + expanding.nbytes :] = 0
        address = self._memory.data_ptr()
        (scale_bits,) = struct.unpack("=q", struct.pack("=d", scale))
        self.entry = (address, address + start, self.rank, scale_bits)


def _units(matrix: Tensor) -> Tensor:
    """[N, K] as [N, units] of 32 bits."""
    if matrix.dtype is torch.float32:
        return matrix.contiguous().view(torch.int32)
    return F.pad(matrix, (0, matrix.shape[1] % 2)).contiguous().view(torch.int32)


class NativeLowRank:
    """See ops.LowRank. `table` is the address of the entries; it stays the same."""

    def __init__(self, isa: Isa, shape: LowRankShape) -> None:
        self.in_features, self.out_features = shape.in_features, sum(shape.widths)
        self._shape, self._isa = shape, isa
        # Of each slot: the memory whose addresses are in the table.
        self._matrices: dict[int, tuple[LowRankMatrices | None, ...]] = {}
        num_parts = len(shape.widths)
        ends = torch.tensor(shape.widths).cumsum(0).tolist()
        is_fp32 = shape.dtype is torch.float32
        head = [shape.in_features, self.out_features, shape.num_slots, num_parts, is_fp32]
        head += [num_parts * shape.max_rank, *ends]
        self._numbers = torch.zeros(len(head) + shape.num_slots * num_parts * _ENTRY, dtype=torch.int64)
        self._numbers[: len(head)] = torch.tensor(head)
        self._entries = self._numbers[len(head) :].view(shape.num_slots, num_parts, _ENTRY)
        self.table: int = self._numbers.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self._numbers.nbytes

    @property
    def is_empty(self) -> bool:
        return not self._matrices

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether rows of this dtype are multiplied."""
        return self._shape.dtype is dtype

    def put(self, slot: int, matrices: Sequence[LowRankMatrices | None]) -> None:
        self._shape.check_put(slot, matrices)
        self._entries[slot] = torch.tensor([_entry(part) for part in matrices])
        self._matrices[slot] = tuple(matrices)

    def clear(self, slot: int) -> None:
        self._shape.check_slot(slot)
        self._entries[slot] = 0
        self._matrices.pop(slot, None)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        self._shape.check_call(x, slots)
        slots = slots.contiguous()
        num_rows = x.shape[0]
        out = torch.empty((num_rows, self.out_features), dtype=torch.float32)
        self._isa.native.low_rank(
            self.table, x.data_ptr(), x.stride(0), slots.data_ptr(), out.data_ptr(), num_rows
        )
        return out


def _entry(part: LowRankMatrices | None) -> tuple[int, ...]:
    if part is None:
        return (0,) * _ENTRY
    if not isinstance(part, NativeMatrices):
        raise ValueError(f"matrices are {type(part).__name__}, packed for another device")
    return part.entry


def pack_low_rank(down: Tensor, up: Tensor, scale: float) -> LowRankMatrices:
    """See ops.Ops.pack_low_rank.  bf16 and fp32; the reference serves other dtypes."""
    check_matrices(down, up)
    if down.dtype not in _DTYPES or not (down.is_cpu and up.is_cpu):
        return REFERENCE.pack_low_rank(down, up, scale)
    return NativeMatrices(down.detach(), up.detach(), scale)


def make_low_rank(
    isa: Isa,
    in_features: int,
    widths: Sequence[int],
    num_slots: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LowRank:
    """See ops.Ops.make_low_rank; otherwise as pack_low_rank.  isa: the instruction set of the kernels."""
    if dtype not in _DTYPES or device.type != "cpu":
        return REFERENCE.make_low_rank(in_features, widths, num_slots, max_rank, dtype, device)
    return NativeLowRank(isa, LowRankShape(in_features, tuple(widths), num_slots, max_rank, dtype))
