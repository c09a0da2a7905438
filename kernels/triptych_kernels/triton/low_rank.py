"""Low-rank additions to projections as Triton kernels, different ones for each token.

Tokens are cut into tiles. Among a tile's tokens with the same slot the first is the leader: its program
computes all of them in one product, and the programs of the others exit. So a prompt reads its matrices
once per tile, different slots run in parallel, and a token's result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.ops import LowRankMatrices
from triptych_kernels.reference.low_rank import LowRankShape, PlainMatrices

# The minimum number of rows of a product on tensor cores.
_TOKENS_PER_TILE = 16


@triton.jit
def _led_tokens(slots_ptr, num_tokens, BLOCK_T: tl.constexpr):
    """(slot, tokens [BLOCK_T], which of them this program computes): the slot is -1 for none."""
    leader = tl.program_id(0).to(tl.int64)
    token = leader // BLOCK_T * BLOCK_T + tl.arange(0, BLOCK_T)
    token_slots = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    slot = tl.load(slots_ptr + leader).to(tl.int64)
    is_led = (token_slots == slot) & (token < num_tokens)
    num_before = tl.sum((is_led & (token < leader)).to(tl.int32), axis=0)
    return tl.where(num_before == 0, slot, -1), token, is_led


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x_ptr,
    weights_ptr,
    slots_ptr,
    out_ptr,
    x_stride,
    num_tokens,
    rank,
    hidden,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One leader's tokens times BLOCK_R rows of its slot's A."""
    slot, token, is_led = _led_tokens(slots_ptr, num_tokens, BLOCK_T)
    if slot >= 0:
        row = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        offset = tl.arange(0, BLOCK_K)
        x_start = x_ptr + token[:, None] * x_stride + offset[None, :]
        weight_start = weights_ptr + (slot * rank + row[None, :]) * hidden + offset[:, None]
        total = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
        for start in range(0, hidden, BLOCK_K):
            is_in_range = offset < hidden - start
            x = tl.load(x_start + start, mask=is_led[:, None] & is_in_range[None, :], other=0.0)
            weight = tl.load(
                weight_start + start, mask=(row < rank)[None, :] & is_in_range[:, None], other=0.0
            )
            if x.dtype != weight.dtype:
                x, weight = x.to(tl.float32), weight.to(tl.float32)
            total = tl.dot(x, weight, total, input_precision="ieee")
        out_start = out_ptr + token[:, None] * rank + row[None, :]
        tl.store(out_start, total, mask=is_led[:, None] & (row < rank)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    x_ptr,
    weights_ptr,
    slots_ptr,
    scales_ptr,
    out_ptr,
    x_stride,
    out_stride,
    num_tokens,
    num_outputs,
    rank,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Adds one leader's tokens times BLOCK_N rows of its slot's B. BLOCK_R is the whole rank."""
    slot, token, is_led = _led_tokens(slots_ptr, num_tokens, BLOCK_T)
    if slot >= 0:
        column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        offset = tl.arange(0, BLOCK_R)
        is_column, is_in_range = column < num_outputs, offset < rank
        x_start = x_ptr + token[:, None] * x_stride + offset[None, :]
        x = tl.load(x_start, mask=is_led[:, None] & is_in_range[None, :], other=0.0)
        weight_start = weights_ptr + (slot * num_outputs + column[None, :]) * rank + offset[:, None]
        weight = tl.load(weight_start, mask=is_column[None, :] & is_in_range[:, None], other=0.0)
        product = tl.dot(x, weight.to(tl.float32), input_precision="ieee") * tl.load(scales_ptr + slot)
        out_start = out_ptr + token[:, None] * out_stride + column[None, :]
        is_out = is_led[:, None] & is_column[None, :]
        out_type = out_ptr.dtype.element_ty
        before = tl.load(out_start, mask=is_out, other=0.0).to(tl.float32)
        tl.store(out_start, (before + product.to(out_type).to(tl.float32)).to(out_type), mask=is_out)


class TritonLowRank:
    """See ops.LowRank. Slots are memory of their own, so a recorded step uses what is put into them later."""

    def __init__(self, shape: LowRankShape, device: torch.device) -> None:
        self.in_features, self.out_features = shape.in_features, sum(shape.widths)
        self._shape = shape
        self._used: set[int] = set()

        def zeros(*size: int, dtype: torch.dtype = shape.dtype) -> Tensor:
            return torch.zeros(shape.num_slots, *size, dtype=dtype, device=device)

        # Of each part. A slot of a lower rank, or without matrices, has zeros.
        self._downs = [zeros(shape.max_rank, shape.in_features) for _ in shape.widths]
        self._ups = [zeros(width, shape.max_rank) for width in shape.widths]
        self._scales = [zeros(dtype=torch.float32) for _ in shape.widths]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (*self._downs, *self._ups, *self._scales))

    @property
    def is_empty(self) -> bool:
        return not self._used

    def put(self, slot: int, matrices: Sequence[LowRankMatrices | None]) -> None:
        self._shape.check_put(slot, matrices)
        if not all(part is None or isinstance(part, PlainMatrices) for part in matrices):
            raise ValueError("matrices are packed for another device")
        self.clear(slot)
        self._used.add(slot)
        for index, part in enumerate(matrices):
            if isinstance(part, PlainMatrices):
                self._downs[index][slot, : part.rank] = part.down
                self._ups[index][slot, :, : part.rank] = part.up
                self._scales[index][slot] = part.scale

    def clear(self, slot: int) -> None:
        self._shape.check_slot(slot)
        self._used.discard(slot)
        for slots in (*self._downs, *self._ups, *self._scales):
            slots[slot] = 0

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        """See ops.LowRank. Slots beyond those that there are read memory beyond them."""
        self._shape.check_call(x, slots)
        out = x.new_zeros(x.shape[0], self.out_features, dtype=torch.float32)
        parts = out.split(list(self._shape.widths), dim=1)
        for down, up, scales, columns in zip(self._downs, self._ups, self._scales, parts, strict=True):
            expand(shrink(x, down, slots), up, slots, scales, columns)
        return out


def make_low_rank(
    in_features: int,
    widths: Sequence[int],
    num_slots: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> TritonLowRank:
    """See ops.Ops.make_low_rank."""
    return TritonLowRank(LowRankShape(in_features, tuple(widths), num_slots, max_rank, dtype), device)


def shrink(x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """x A^T of each token's own slot, in fp32.

    x: [T, hidden], rows contiguous.  weights: [slots, rank, hidden] contiguous.  slots: [T] int32 or
    int64, -1 is none and gives 0.  Returns [T, rank] fp32.
    """
    num_tokens, hidden = x.shape
    rank = weights.shape[1]
    _check_layout(x, weights, slots, hidden)
    out = x.new_zeros(num_tokens, rank, dtype=torch.float32)
    if num_tokens == 0:
        return out
    block = min(64, max(16, triton.next_power_of_2(rank)))
    _shrink_kernel[(num_tokens, triton.cdiv(rank, block))](
        x,
        weights,
        slots,
        out,
        x.stride(0),
        num_tokens,
        rank,
        hidden,
        BLOCK_T=_TOKENS_PER_TILE,
        BLOCK_R=block,
        BLOCK_K=128,
    )
    return out


def expand(x: Tensor, weights: Tensor, slots: Tensor, scales: Tensor, out: Tensor) -> None:
    """out += scale * x B^T of each token's own slot, in place; the product is in fp32 and rounded once.

    x: [T, rank] fp32, rows contiguous.  weights: [slots, N, rank] contiguous.  slots: [T], -1 adds
    nothing.  scales: [slots] fp32.  out: [T, N], rows contiguous, written.
    """
    num_tokens, rank = x.shape
    num_outputs = weights.shape[1]
    _check_layout(x, weights, slots, rank)
    if out.shape != (num_tokens, num_outputs) or out.stride(-1) != 1:
        raise ValueError(f"out is {tuple(out.shape)} with strides {out.stride()}, not rows of {num_outputs}")
    if num_tokens == 0:
        return
    block = 64
    _expand_kernel[(num_tokens, triton.cdiv(num_outputs, block))](
        x,
        weights,
        slots,
        scales,
        out,
        x.stride(0),
        out.stride(0),
        num_tokens,
        num_outputs,
        rank,
        BLOCK_T=_TOKENS_PER_TILE,
        BLOCK_N=block,
        BLOCK_R=max(16, triton.next_power_of_2(rank)),
    )


def _check_layout(x: Tensor, weights: Tensor, slots: Tensor, num_inputs: int) -> None:
    if weights.shape[2] != num_inputs or not weights.is_contiguous():
        raise ValueError(f"the weights are {tuple(weights.shape)}, not contiguous rows of {num_inputs}")
    if x.stride(-1) != 1:
        raise ValueError(f"the columns of x must be contiguous; their stride is {x.stride(-1)}")
    if slots.shape != x.shape[:1]:
        raise ValueError(f"{x.shape[0]} tokens have {tuple(slots.shape)} slots")
