"""Mixtures of experts as grouped products over (token, expert) pairs, as Triton kernels.

Pairs are sorted by expert on the device, keeping the order of tokens. A tile is consecutive pairs of one
expert. Only the device knows the number of tiles, so a launch has the maximum number of programs, and those
beyond the last tile exit. So nothing waits for the device, and a CUDA graph of a step serves every choice of
experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.ops import ExpertBiases, Experts
from triptych_kernels.quantized import ExpertWeights, stacked
from triptych_kernels.reference.activation import CLAMP, GATED_EXPERTS, SWIGLU_ALPHA
from triptych_kernels.reference.moe import check_follows, expert_slice_of, joined_biases

_PAIRS_PER_PASS = 1024
_CLAMP, _SWIGLU_ALPHA = tl.constexpr(CLAMP), tl.constexpr(SWIGLU_ALPHA)


@triton.jit(do_not_specialize=["num_pairs"])
def _order_pairs_kernel(
    expert_ids_ptr, pairs_ptr, starts_ptr, counts_ptr, num_pairs, first_expert, BLOCK_P: tl.constexpr
):
    """One expert's pairs, in order, after those of the experts before it; their start and number."""
    expert = tl.program_id(0)
    offset = tl.arange(0, BLOCK_P)
    start, count = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, num_pairs, BLOCK_P):
        is_pair = first + offset < num_pairs
        local = tl.load(expert_ids_ptr + first + offset, mask=is_pair, other=-1).to(tl.int64) - first_expert
        is_pair = is_pair & (local >= 0)
        start += tl.sum((is_pair & (local < expert)).to(tl.int32), axis=0)
        count += tl.sum((is_pair & (local == expert)).to(tl.int32), axis=0)
    tl.store(starts_ptr + expert, start)
    tl.store(counts_ptr + expert, count)
    for first in range(0, num_pairs, BLOCK_P):
        is_pair = first + offset < num_pairs
        local = tl.load(expert_ids_ptr + first + offset, mask=is_pair, other=-1).to(tl.int64) - first_expert
        is_own = (is_pair & (local == expert)).to(tl.int32)
        tl.store(pairs_ptr + start + tl.cumsum(is_own, axis=0) - 1, first + offset, mask=is_own > 0)
        start += tl.sum(is_own, axis=0)


@triton.jit
def _find_tile(starts_ptr, counts_ptr, tile, num_experts, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr):
    """(expert, index of the tile's first pair, end of the expert's pairs); num_experts for no expert."""
    expert = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + expert, mask=expert < num_experts, other=0)
    ends = tl.cumsum((counts + BLOCK_P - 1) // BLOCK_P, axis=0)
    chosen = tl.sum(((ends <= tile) & (expert < num_experts)).to(tl.int32), axis=0)
    num_tiles_before = tl.max(tl.where(expert < chosen, ends, 0), axis=0)
    start = tl.load(starts_ptr + chosen, mask=chosen < num_experts, other=0)
    count = tl.load(counts_ptr + chosen, mask=chosen < num_experts, other=0)
    return chosen, start + (tile - num_tiles_before) * BLOCK_P, start + count


@triton.jit(do_not_specialize=["num_pairs_per_token"])
def _gate_up_kernel(
    x_ptr,
    gate_up_ptr,
    bias_ptr,
    pairs_ptr,
    starts_ptr,
    counts_ptr,
    hidden_ptr,
    x_stride,
    num_pairs_per_token,
    num_experts,
    num_features,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What is made of gates and ups of a tile of pairs, BLOCK_N features; sorted by expert."""
    expert, first, end = _find_tile(starts_ptr, counts_ptr, tl.program_id(0), num_experts, BLOCK_P, BLOCK_E)
    if expert < num_experts:
        slot = first + tl.arange(0, BLOCK_P)
        feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        offset = tl.arange(0, BLOCK_K)
        is_slot, is_feature = slot < end, feature < num_features
        token = tl.load(pairs_ptr + slot, mask=is_slot, other=0) // num_pairs_per_token
        gate_row = expert.to(tl.int64) * 2 * num_features + feature
        x_start = x_ptr + token.to(tl.int64)[:, None] * x_stride + offset[None, :]
        gate_start = gate_up_ptr + gate_row[None, :] * num_inputs + offset[:, None]
        up_start = gate_up_ptr + (gate_row[None, :] + num_features) * num_inputs + offset[:, None]
        gate = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
        for start in range(0, num_inputs, BLOCK_K):
            is_in_range = offset < num_inputs - start
            x = tl.load(x_start + start, mask=is_slot[:, None] & is_in_range[None, :], other=0.0)
            is_weight = is_feature[None, :] & is_in_range[:, None]
            gate_weight = tl.load(gate_start + start, mask=is_weight, other=0.0)
            gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
            up_weight = tl.load(up_start + start, mask=is_weight, other=0.0)
            up = tl.dot(x, up_weight, up, input_precision="ieee")
        if HAS_BIAS:
            bias_start = bias_ptr + gate_row
            gate += tl.load(bias_start, mask=is_feature, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_start + num_features, mask=is_feature, other=0.0).to(tl.float32)[None, :]
        exponent = gate
        if IS_CLAMPED:
            # A comparison with NaN is false, so that it stays.
            gate = tl.where(gate > _CLAMP, _CLAMP, gate)
            up = tl.where(up > _CLAMP, _CLAMP, tl.where(up < -_CLAMP, -_CLAMP, up)) + 1.0
            exponent = _SWIGLU_ALPHA * gate
        product = gate / (1.0 + tl.exp(-exponent)) * up
        hidden_start = hidden_ptr + slot.to(tl.int64)[:, None] * num_features + feature[None, :]
        is_hidden = is_slot[:, None] & is_feature[None, :]
        tl.store(hidden_start, product.to(hidden_ptr.dtype.element_ty), mask=is_hidden)


@triton.jit
def _down_kernel(
    hidden_ptr,
    down_ptr,
    bias_ptr,
    pairs_ptr,
    starts_ptr,
    counts_ptr,
    parts_ptr,
    num_experts,
    num_outputs,
    num_features,
    HAS_BIAS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """down(hidden) of a tile of pairs, BLOCK_N outputs; stored in order of pairs."""
    expert, first, end = _find_tile(starts_ptr, counts_ptr, tl.program_id(0), num_experts, BLOCK_P, BLOCK_E)
    if expert < num_experts:
        slot = first + tl.arange(0, BLOCK_P)
        output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        offset = tl.arange(0, BLOCK_K)
        is_slot, is_output = slot < end, output < num_outputs
        pair = tl.load(pairs_ptr + slot, mask=is_slot, other=0)
        row = expert.to(tl.int64) * num_outputs + output
        hidden_start = hidden_ptr + slot.to(tl.int64)[:, None] * num_features + offset[None, :]
        weight_start = down_ptr + row[None, :] * num_features + offset[:, None]
        total = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
        for start in range(0, num_features, BLOCK_K):
            is_in_range = offset < num_features - start
            hidden = tl.load(hidden_start + start, mask=is_slot[:, None] & is_in_range[None, :], other=0.0)
            weight = tl.load(weight_start + start, mask=is_output[None, :] & is_in_range[:, None], other=0.0)
            total = tl.dot(hidden, weight, total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias_ptr + row, mask=is_output, other=0.0).to(tl.float32)[None, :]
        parts_start = parts_ptr + pair.to(tl.int64)[:, None] * num_outputs + output[None, :]
        is_part = is_slot[:, None] & is_output[None, :]
        tl.store(parts_start, total.to(parts_ptr.dtype.element_ty), mask=is_part)


@triton.jit
def _sum_parts_kernel(
    parts_ptr,
    expert_ids_ptr,
    weights_ptr,
    out_ptr,
    num_outputs,
    first_expert,
    num_experts,
    NUM_PAIRS_PER_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One token's parts times their weights, summed in fp32 in the order of its experts."""
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = output < num_outputs
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for index in range(NUM_PAIRS_PER_TOKEN):
        pair = token * NUM_PAIRS_PER_TOKEN + index
        local = tl.load(expert_ids_ptr + pair).to(tl.int64) - first_expert
        # A part that was not written is not read either.
        is_read = is_output & (local >= 0) & (local < num_experts)
        part = tl.load(parts_ptr + pair * num_outputs + output, mask=is_read, other=0.0).to(tl.float32)
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        total += tl.where(is_read, part * weight, 0.0)
    tl.store(out_ptr + token * num_outputs + output, total.to(out_ptr.dtype.element_ty), mask=is_output)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Tile sizes of one program of a grouped product, and its launch options."""

    pairs: int
    outputs: int
    inputs: int
    num_warps: int


# Large enough for prompts. With the few pairs of a decode, reading weights dominates, whatever the tile.
_FIXED_TILE = _Tile(pairs=64, outputs=64, inputs=64, num_warps=4)
# By the average number of pairs per expert.
_TILES = ((16, _Tile(pairs=16, outputs=64, inputs=64, num_warps=4)), (64, _FIXED_TILE))
_LARGE_TILE = _Tile(pairs=128, outputs=64, inputs=64, num_warps=8)
_NUM_STAGES = 3
_OUTPUTS_PER_SUM = 1024


class _TritonExperts:
    """This rank's experts, as two grouped products and a sum."""

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        biases: ExpertBiases | None,
        gate: str,
        first_expert: int,
        is_fixed: bool,
    ) -> None:
        self._gate_up, self._down = gate_up.contiguous(), down.contiguous()
        self._biases, self._gate = biases, gate
        self.num_bytes = gate_up.nbytes + down.nbytes + (0 if biases is None else biases.num_bytes)
        self._first_expert, self._is_fixed = first_expert, is_fixed
        self.expert_range = (first_expert, first_expert + down.shape[0])

    def take(self, first: int, end: int) -> _TritonExperts:
        expert_slice = expert_slice_of(self.expert_range, first, end)
        biases = None if self._biases is None else self._biases.part(expert_slice)
        gate_up, down = self._gate_up[expert_slice].clone(), self._down[expert_slice].clone()
        return _TritonExperts(gate_up, down, biases, self._gate, first, self._is_fixed)

    def join(self, more: Experts) -> _TritonExperts:
        if not isinstance(more, _TritonExperts):
            raise ValueError(f"experts of {type(more).__name__} cannot follow those of a GPU")
        check_follows(self.expert_range, more.expert_range)
        return _TritonExperts(
            torch.cat([self._gate_up, more._gate_up]),
            torch.cat([self._down, more._down]),
            joined_biases(self._biases, more._biases),
            self._gate,
            self._first_expert,
            self._is_fixed,
        )

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        if expert_ids.shape != expert_weights.shape or expert_ids.shape[0] != x.shape[0]:
            raise ValueError(
                f"{x.shape[0]} tokens have expert ids {tuple(expert_ids.shape)} and weights "
                f"{tuple(expert_weights.shape)}"
            )
        if x.stride(-1) != 1:
            raise ValueError(f"the columns of x must be contiguous; their stride is {x.stride(-1)}")
        ids, weights = expert_ids.contiguous(), expert_weights.contiguous()
        num_pairs = ids.numel()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if num_pairs == 0:
            return out.zero_()
        num_experts, num_outputs, num_features = self._down.shape
        biases = (None, None) if self._biases is None else (self._biases.gate_up, self._biases.down)
        tile = self._tile_for(num_pairs, x.dtype)
        pairs, starts, counts = self._order(ids)
        hidden = x.new_empty(num_pairs, num_features)
        parts = x.new_empty(num_pairs, num_outputs)
        # Full tiles, and at most one partial tile for each chosen expert.
        max_tiles = num_pairs // tile.pairs + min(num_experts, num_pairs)
        shape = {
            "BLOCK_E": triton.next_power_of_2(num_experts),
            "BLOCK_P": tile.pairs,
            "BLOCK_N": tile.outputs,
            "BLOCK_K": tile.inputs,
            "num_warps": tile.num_warps,
            "num_stages": _NUM_STAGES,
        }
        _gate_up_kernel[(max_tiles, triton.cdiv(num_features, tile.outputs))](
            x,
            self._gate_up,
            biases[0],
            pairs,
            starts,
            counts,
            hidden,
            x.stride(0),
            ids.shape[1],
            num_experts,
            num_features,
            x.shape[1],
            HAS_BIAS=biases[0] is not None,
            IS_CLAMPED=self._gate == "clamped_swiglu",
            **shape,
        )
        _down_kernel[(max_tiles, triton.cdiv(num_outputs, tile.outputs))](
            hidden,
            self._down,
            biases[1],
            pairs,
            starts,
            counts,
            parts,
            num_experts,
            num_outputs,
            num_features,
            HAS_BIAS=biases[1] is not None,
            **shape,
        )
        _sum_parts_kernel[(x.shape[0], triton.cdiv(num_outputs, _OUTPUTS_PER_SUM))](
            parts,
            ids,
            weights,
            out,
            num_outputs,
            self._first_expert,
            num_experts,
            NUM_PAIRS_PER_TOKEN=ids.shape[1],
            BLOCK_N=_OUTPUTS_PER_SUM,
        )
        return out

    def _order(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[P] int32 pairs sorted by expert; [E] int32 first pair of each expert, and number of its pairs."""
        num_experts = self._down.shape[0]
        pairs = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
        starts, counts = torch.empty(2, num_experts, dtype=torch.int32, device=ids.device)
        _order_pairs_kernel[(num_experts,)](
            ids, pairs, starts, counts, ids.numel(), self._first_expert, BLOCK_P=_PAIRS_PER_PASS
        )
        return pairs, starts, counts

    def _tile_for(self, num_pairs: int, dtype: torch.dtype) -> _Tile:
        if self._is_fixed:
            return _FIXED_TILE
        for most_pairs, tile in _TILES:
            if num_pairs <= most_pairs * self._down.shape[0]:
                return tile
        # Three of the largest tiles of fp32 do not fit in shared memory.
        return _TILES[-1][1] if dtype is torch.float32 else _LARGE_TILE


def pack_experts(
    gate_ups: ExpertWeights,
    downs: ExpertWeights,
    *,
    biases: ExpertBiases | None = None,
    gate: str = "silu",
    first_expert: int = 0,
    activations: str = "exact",
    deterministic: bool = False,
) -> _TritonExperts:
    """See ops.PackExperts; rows are not rounded.  deterministic: a token has the same bits in every batch."""
    gate_up, down = stacked(gate_ups), stacked(downs)
    num_experts, num_outputs, num_features = down.shape
    if gate_up.shape[:2] != (num_experts, 2 * num_features) or gate_up.shape[2] != num_outputs:
        raise ValueError(
            f"gate_up is {tuple(gate_up.shape)}, which does not go with down {tuple(down.shape)}"
        )
    if biases is not None:
        biases = ExpertBiases(biases.gate_up.contiguous(), biases.down.contiguous())
    if gate not in GATED_EXPERTS:
        raise ValueError(f"gate is {gate!r}: experts have {', '.join(GATED_EXPERTS)}")
    return _TritonExperts(gate_up, down, biases, gate, first_expert, deterministic)
