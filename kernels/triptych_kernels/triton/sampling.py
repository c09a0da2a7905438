"""Choosing tokens, as Triton kernels without sorting.

A row's cuts are thresholds on its weights, exp((logit - largest) / temperature), and what is kept depends
only on counts and sums of the weights above a threshold. So a threshold is found by narrowing down its bits,
four parts at a time, and a token by its index in the running sum over the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.ops import Linear
from triptych_kernels.reference.sampling import MIN_TEMPERATURE

_TOKENS_PER_TILE = 4096
_NUM_WARPS = 16


@triton.jit
def _greedy_kernel(
    logits_ptr, highest_ptr, tokens_ptr, logits_stride, vocab_size, num_parts, BLOCK_V: tl.constexpr
):
    """The largest of BLOCK_V logits of a row, NaN if any is, and the first token that has it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK_V + tl.arange(0, BLOCK_V)
    start = logits_ptr + row * logits_stride
    logits = tl.load(start + token, mask=token < vocab_size, other=float("-inf"))
    logits = logits.to(tl.float32)
    num_nan = tl.sum((logits != logits).to(tl.int32), axis=0)
    highest = tl.max(tl.where(logits != logits, float("-inf"), logits), axis=0)
    first = tl.min(tl.where(logits == highest, token, vocab_size - 1), axis=0)
    tl.store(highest_ptr + row * num_parts + part, tl.where(num_nan > 0, float("nan"), highest))
    tl.store(tokens_ptr + row * num_parts + part, first.to(tl.int64))


@triton.jit
def _greedy_of_parts_kernel(
    part_highest_ptr, part_tokens_ptr, highest_ptr, tokens_ptr, num_parts, BLOCK_P: tl.constexpr
):
    """The same for a row, from its parts."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_P)
    start = part_highest_ptr + row * num_parts
    highest = tl.load(start + part, mask=part < num_parts, other=float("-inf"))
    num_nan = tl.sum((highest != highest).to(tl.int32), axis=0)
    largest = tl.max(tl.where(highest != highest, float("-inf"), highest), axis=0)
    first = tl.min(tl.where(highest == largest, part, num_parts - 1), axis=0)
    tl.store(highest_ptr + row, tl.where(num_nan > 0, float("nan"), largest))
    tl.store(tokens_ptr + row, tl.load(part_tokens_ptr + row * num_parts + first))


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and the first token that has it; NaN where a row has any NaN.

    logits: [N, V], any float dtype, rows contiguous.  Returns [N] fp32 and [N] int64; any token where NaN is.
    """
    num_rows, vocab_size = logits.shape
    _check_rows(logits)
    block = min(_TOKENS_PER_TILE, triton.next_power_of_2(vocab_size))
    num_parts = triton.cdiv(vocab_size, block)
    highest = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return highest.view(0), tokens.view(0)
    _greedy_kernel[(num_rows, num_parts)](
        logits, highest, tokens, logits.stride(0), vocab_size, num_parts, BLOCK_V=block
    )
    if num_parts == 1:
        return highest.squeeze(1), tokens.squeeze(1)
    of_rows = torch.empty_like(highest[:, 0]), torch.empty_like(tokens[:, 0])
    _greedy_of_parts_kernel[(num_rows,)](
        highest, tokens, *of_rows, num_parts, BLOCK_P=triton.next_power_of_2(num_parts)
    )
    return of_rows


def greedy_linear(linear: Linear, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The products x W^T + b of the rows `kept`, and the result of `greedy` for those of all rows.

    x: [N, in_features].  kept: [K] int64, ascending.  Returns [K, V] in the linear's dtype, [N] fp32 and
    [N] int64.
    """
    logits = linear(x)
    return logits.index_select(0, kept), *greedy(logits)


@triton.jit
def _weights(logits_start, token, vocab_size, highest, sharpness):
    """Weights [BLOCK_V] fp32 of tokens, exactly 1 for the largest logit; 0 beyond the vocabulary."""
    logits = tl.load(logits_start + token, mask=token < vocab_size, other=float("-inf"))
    return tl.exp((logits - highest) * sharpness)


@triton.jit
def _kept(
    logits_start,
    vocab_size,
    highest,
    sharpness,
    low,
    step,
    high,
    BY_SUM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The amounts kept at low + 1, 2 and 3 steps, and the smallest and largest weight from low to below high.

    Thresholds are passed, and these weights returned, as bits. An amount is a sum of weights, or a count.
    """
    first, second = (low + step).to(tl.float32, bitcast=True), (low + 2 * step).to(tl.float32, bitcast=True)
    third = (low + 3 * step).to(tl.float32, bitcast=True)
    bottom, top = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    kept_1 = tl.zeros((BLOCK_V,), dtype=tl.float32)
    kept_2 = tl.zeros((BLOCK_V,), dtype=tl.float32)
    kept_3 = tl.zeros((BLOCK_V,), dtype=tl.float32)
    smallest = tl.full((BLOCK_V,), 2.0, tl.float32)
    largest = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        token = start + tl.arange(0, BLOCK_V)
        weights = _weights(logits_start, token, vocab_size, highest, sharpness)
        amount = tl.full((BLOCK_V,), 1.0, tl.float32)
        if BY_SUM:
            amount = weights
        kept_1 += tl.where(weights >= first, amount, 0.0)
        kept_2 += tl.where(weights >= second, amount, 0.0)
        kept_3 += tl.where(weights >= third, amount, 0.0)
        is_between = (weights >= bottom) & (weights < top)
        smallest = tl.minimum(smallest, tl.where(is_between, weights, 2.0))
        largest = tl.maximum(largest, tl.where(is_between, weights, 0.0))
    return (
        tl.sum(kept_1.to(tl.float64), axis=0),
        tl.sum(kept_2.to(tl.float64), axis=0),
        tl.sum(kept_3.to(tl.float64), axis=0),
        tl.min(smallest, axis=0).to(tl.int32, bitcast=True),
        tl.max(largest, axis=0).to(tl.int32, bitcast=True),
    )


@triton.jit
def _narrow(
    logits_start,
    vocab_size,
    highest,
    sharpness,
    low,
    share,
    BY_SUM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The largest threshold, as bits and not below `low`, that keeps enough; `low` if not even that does.

    Enough is `share` of the sum of what `low` keeps, or, without BY_SUM, `share` tokens.
    """
    # Weights are not negative, so their bits have the order of the weights; none is above 1.
    high = low * 0 + 0x3F800001
    kept, _, _, smallest, largest = _kept(
        logits_start, vocab_size, highest, sharpness, low, low * 0, high, BY_SUM, BLOCK_V
    )
    low = tl.maximum(low, smallest)
    needed = share.to(tl.float64)
    if BY_SUM:
        needed = needed * kept
    # What is enough at `low` is too little at `high`; when one weight is left between them it is the answer.
    while (high - low > 1) & (kept > needed):
        step = (high - low + 3) // 4
        kept_1, kept_2, kept_3, smallest, largest = _kept(
            logits_start, vocab_size, highest, sharpness, low, step, high, BY_SUM, BLOCK_V
        )
        is_1, is_2, is_3 = kept_1 >= needed, kept_2 >= needed, kept_3 >= needed
        if is_3:
            low, kept = low + 3 * step, kept_3
        elif is_2:
            low, high, kept = low + 2 * step, tl.minimum(high, low + 3 * step), kept_2
        elif is_1:
            low, high, kept = low + step, tl.minimum(high, low + 2 * step), kept_1
        else:
            high = tl.minimum(high, low + step)
        low, high = tl.maximum(low, smallest), tl.minimum(high, largest + 1)
    return low


# No specialization on the alignment of the columns of one tensor, which depends on the number of rows.
@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"])
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniforms_ptr,
    tokens_ptr,
    logits_stride,
    vocab_size,
    min_temperature,
    NUM_TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One token of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_start = logits_ptr + row * logits_stride
    sharpness = 1.0 / tl.maximum(tl.load(temperature_ptr + row), min_temperature)
    maxima = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        token = start + tl.arange(0, BLOCK_V)
        logits = tl.load(logits_start + token, mask=token < vocab_size, other=float("-inf"))
        maxima = tl.maximum(maxima, logits)
    highest = tl.max(maxima, axis=0)

    # The bits of the smallest weight that is kept. Tokens of weight 0 are not searched.
    least = tl.maximum(tl.load(min_p_ptr + row).to(tl.int32, bitcast=True), 1)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if (top_k > 0) & (top_k < vocab_size):
        least = _narrow(logits_start, vocab_size, highest, sharpness, least, top_k, False, BLOCK_V)
    if top_p < 1.0:
        least = _narrow(logits_start, vocab_size, highest, sharpness, least, top_p, True, BLOCK_V)
    smallest = least.to(tl.float32, bitcast=True)

    tile = tl.arange(0, NUM_TILES)
    sums = tl.zeros((NUM_TILES,), dtype=tl.float64)
    for start in range(0, vocab_size, BLOCK_V):
        weights = _weights(logits_start, start + tl.arange(0, BLOCK_V), vocab_size, highest, sharpness)
        kept = tl.where(weights >= smallest, weights, 0.0).to(tl.float64)
        sums = tl.where(tile == start // BLOCK_V, tl.sum(kept, axis=0), sums)
    target = tl.load(uniforms_ptr + row) * tl.sum(sums, axis=0)
    # Sums taken in two orders differ by a rounding: never step past the last tile and token with weight.
    reached = tl.cumsum(sums, axis=0)
    last = tl.max(tl.where(sums > 0.0, tile, 0), axis=0)
    chosen = tl.min(tl.where((reached > target) & (sums > 0.0), tile, last), axis=0)
    before = tl.sum(tl.where(tile < chosen, sums, 0.0), axis=0)

    offset = tl.arange(0, BLOCK_V)
    weights = _weights(logits_start, chosen * BLOCK_V + offset, vocab_size, highest, sharpness)
    kept = tl.where(weights >= smallest, weights, 0.0).to(tl.float64)
    reached = tl.cumsum(kept, axis=0) + before
    last = tl.max(tl.where(kept > 0.0, offset, 0), axis=0)
    inside = tl.min(tl.where((reached > target) & (kept > 0.0), offset, last), axis=0)
    tl.store(tokens_ptr + row, (chosen * BLOCK_V + inside).to(tl.int64))


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """Draw one token per row from softmax(logits / temperature), cut by min-p, then top-k, then top-p.

    By inverse CDF in vocabulary order. Min-p keeps what has at least min_p times the largest probability,
    top-k the k largest, top-p the fewest largest of the rest that reach top_p of its mass; ties of the
    smallest kept stay in. A row's token is a pure function of the row. The reference adds up in another
    order, so theirs may differ where what top-p or the uniform number asks for is within 1e-6 of a border.
    logits: [N, V] fp32, rows contiguous, finite maximum.  temperature: [N] fp32 above 0.  top_k: [N] int64,
    0 = all.  top_p: [N] fp32 in (0, 1].  min_p: [N] fp32 in [0, 1].  uniforms: [N] float64 in [0, 1); all
    contiguous.  Returns [N] int64; any token for a row without a finite maximum.
    """
    num_rows, vocab_size = logits.shape
    _check_rows(logits)
    for column in (temperature, top_k, top_p, min_p, uniforms):
        if column.shape != (num_rows,) or not column.is_contiguous():
            raise ValueError(f"{num_rows} rows have a column of shape {tuple(column.shape)}")
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    block = min(_TOKENS_PER_TILE, triton.next_power_of_2(vocab_size))
    _sample_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        uniforms,
        tokens,
        logits.stride(0),
        vocab_size,
        MIN_TEMPERATURE,
        NUM_TILES=triton.next_power_of_2(triton.cdiv(vocab_size, block)),
        BLOCK_V=block,
        num_warps=_NUM_WARPS if block == _TOKENS_PER_TILE else 4,
    )
    return tokens


def _check_rows(logits: Tensor) -> None:
    if logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(
            f"logits are {tuple(logits.shape)} with strides {logits.stride()}, not rows of tokens"
        )
