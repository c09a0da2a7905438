"""Norms, rotary positions, KV stores, activations and the greedy choice by native kernels.

Each computes what its reference does, for bf16 and fp32 rows; other dtypes and layouts go to the reference
itself. A row's result has the same bits in every batch. Knows tensors and addresses; the arithmetic is in
elementwise.cpp, compiled for each instruction set (isa).
"""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu.loader import Isa
from triptych_kernels.reference import REFERENCE
from triptych_kernels.reference.activation import GATED

_BF16, _FP32, _INT64 = torch.bfloat16, torch.float32, torch.int64
_DTYPES = (_BF16, _FP32)
MAX_HEAD_DIM = 1024
GATES = {"silu": 0, "gelu_tanh": 1}  # of projections, as numbered in vector_math.h
_GATES = {**GATES, "sigmoid": 3}
_REFERENCES = {**GATED, "sigmoid": REFERENCE.sigmoid_and_mul}


def rms_norm(isa: Isa, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the reference.  x: [..., hidden]; rows, and the heads of [T, H, hidden], may be strided."""
    dtype, shape, strides = x.dtype, x.shape, x.stride()
    if dtype not in _DTYPES or not _weighs(weight, dtype):
        return REFERENCE.rms_norm(x, weight, eps)
    width, num_dims = shape[-1], len(shape)
    if num_dims > 3 or strides[-1] != 1:
        x = x.contiguous()
        num_inner, inner_stride, num_outer, outer_stride = x.numel() // max(1, width), width, 1, 0
    else:
        num_inner, inner_stride = (shape[-2], strides[-2]) if num_dims > 1 else (1, 0)
        num_outer, outer_stride = (shape[0], strides[0]) if num_dims > 2 else (1, 0)
    _check_weight(weight, width)
    out = torch.empty(shape, dtype=dtype)
    if out.numel():
        isa.native.rms_norm(
            x.data_ptr(),
            0,
            weight.data_ptr(),
            out.data_ptr(),
            num_outer,
            num_inner,
            outer_stride,
            inner_stride,
            0,
            width,
            dtype is _BF16,
            weight.dtype is _FP32,
            eps,
        )
    return out


def add_rms_norm(isa: Isa, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the reference; residual is written.  x, residual: [T, hidden], rows may be strided."""
    dtype = x.dtype
    (num_rows, width), (x_stride, x_last), (stride, last) = x.shape, x.stride(), residual.stride()
    if (
        dtype not in _DTYPES
        or residual.dtype is not dtype
        or not _weighs(weight, dtype)
        or x_last != 1
        or last != 1
    ):
        return REFERENCE.add_rms_norm(x, residual, weight, eps)
    if residual.shape != x.shape:
        raise ValueError(f"residual is {tuple(residual.shape)}, x is {tuple(x.shape)}")
    _check_weight(weight, width)
    out = torch.empty((num_rows, width), dtype=dtype)
    if num_rows:
        isa.native.rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            1,
            num_rows,
            0,
            x_stride,
            stride,
            width,
            dtype is _BF16,
            weight.dtype is _FP32,
            eps,
        )
    return out


def _weighs(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels norm rows of this dtype with the weight: it may be more precise than they are."""
    return weight.dtype in (dtype, _FP32) and weight.is_contiguous()


def _check_weight(weight: Tensor, width: int) -> None:
    if weight.numel() != width:
        raise ValueError(f"weight has {weight.numel()} numbers, a row {width}")


def gate_and_mul(isa: Isa, gate: str, x: Tensor) -> Tensor:
    """See the reference of the gate's op.  x: [T, 2 F], rows may be strided.  gate: of _GATES."""
    dtype, shape, strides = x.dtype, x.shape, x.stride()
    if dtype not in _DTYPES or len(shape) != 2 or strides[1] != 1 or shape[1] % 2:
        return _REFERENCES[gate](x)
    num_rows, width = shape[0], shape[1] // 2
    out = torch.empty((num_rows, width), dtype=dtype)
    isa.native.gate_and_mul(
        x.data_ptr(), out.data_ptr(), num_rows, width, strides[0], dtype is _BF16, _GATES[gate]
    )
    return out


def kv_write(
    isa: Isa, keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """See the reference, for any dtype.  IndexError, and nothing stored, if a slot is beyond the cache."""
    num_blocks, num_kv_heads, block_size, key_dim = key_cache.shape
    value_dim, num_bytes = value_cache.shape[3], key_cache.element_size()
    num_tokens = keys.shape[0]
    if (
        not (key_cache.is_contiguous() and value_cache.is_contiguous())
        or key_cache.dtype is not keys.dtype
        or value_cache.dtype is not values.dtype
        or keys.dtype is not values.dtype
    ):
        return REFERENCE.kv_write(keys, values, key_cache, value_cache, slot_mapping)
    if keys.shape != (num_tokens, num_kv_heads, key_dim) or values.shape != (
        num_tokens,
        num_kv_heads,
        value_dim,
    ):
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit the caches")
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    if values.stride(2) != 1:
        values = values.contiguous()
    slots = one_a_token(slot_mapping, num_tokens, "slot_mapping")
    (key_stride, key_head_stride, _), (value_stride, value_head_stride, _) = keys.stride(), values.stride()
    isa.native.kv_write(
        keys.data_ptr(),
        key_stride * num_bytes,
        key_head_stride * num_bytes,
        key_cache.data_ptr(),
        key_dim * num_bytes,
        values.data_ptr(),
        value_stride * num_bytes,
        value_head_stride * num_bytes,
        value_cache.data_ptr(),
        value_dim * num_bytes,
        slots.data_ptr(),
        num_tokens,
        num_kv_heads,
        num_blocks * block_size,
        block_size,
    )
    return None


def one_a_token(numbers: Tensor, count: int, name: str) -> Tensor:
    """The ids as contiguous int64. Raises ValueError if there are not `count` of them."""
    if numbers.dtype is not _INT64 or not numbers.is_contiguous():
        numbers = numbers.to(_INT64).contiguous()
    if numbers.numel() != count:
        raise ValueError(f"{name} has {numbers.numel()} numbers for {count} tokens")
    return numbers


def rotary_kv_write(
    isa: Isa,
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """See the reference.  qkv: [T, (H + 2 G) D], written, rows may be strided.

    IndexError, and nothing written, if a position is beyond cos_sin or a slot beyond the cache.
    """
    dtype = qkv.dtype
    num_tokens, width = qkv.shape
    row_stride, stride = qkv.stride()
    num_blocks, num_kv_heads, block_size, head_dim = key_cache.shape
    max_positions, rotary_dim = cos_sin.shape
    norms = () if query_norm is None or key_norm is None else (query_norm, key_norm)
    if (
        dtype not in _DTYPES
        or stride != 1
        or head_dim > MAX_HEAD_DIM
        or key_cache.dtype is not dtype
        or value_cache.dtype is not dtype
        or cos_sin.dtype is not _FP32
        or not (key_cache.is_contiguous() and value_cache.is_contiguous() and cos_sin.is_contiguous())
        or not all(_weighs(norm, dtype) for norm in norms)
        or len({norm.dtype for norm in norms}) > 1
    ):
        return REFERENCE.rotary_kv_write(
            qkv, positions, cos_sin, slot_mapping, key_cache, value_cache,
            num_heads=num_heads, query_norm=query_norm, key_norm=key_norm, eps=eps,
        )  # fmt: skip
    if width != (num_heads + 2 * num_kv_heads) * head_dim or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} is not {num_heads} heads and twice those of the caches"
            f" {tuple(key_cache.shape)}, {tuple(value_cache.shape)}"
        )
    if rotary_dim > head_dim or rotary_dim % 2:
        raise ValueError(f"rotary_dim is {rotary_dim}, not an even number up to {head_dim}")
    if any(norm.numel() != head_dim for norm in norms):
        raise ValueError(f"query_norm and key_norm are not of {head_dim} numbers")
    slots = one_a_token(slot_mapping, num_tokens, "slot_mapping")
    positions = one_a_token(positions, num_tokens, "positions")
    isa.native.rotary_kv_write(
        qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), slots.data_ptr(),
        key_cache.data_ptr(), value_cache.data_ptr(),
        norms[0].data_ptr() if norms else 0, norms[1].data_ptr() if norms else 0,
        row_stride, num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim,
        num_blocks * block_size, block_size, max_positions, dtype is _BF16,
        any(norm.dtype is _FP32 for norm in norms), eps,
    )  # fmt: skip
    return None


def greedy(isa: Isa, logits: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference.  logits: [N, V], rows may be strided. The token of a row with NaN is arbitrary."""
    dtype, (num_rows, width), (row_stride, stride) = logits.dtype, logits.shape, logits.stride()
    if dtype not in _DTYPES or stride != 1 or width == 0:
        return REFERENCE.greedy(logits)
    highest, tokens = torch.empty(num_rows, dtype=_FP32), torch.empty(num_rows, dtype=_INT64)
    isa.native.greedy(
        logits.data_ptr(), highest.data_ptr(), tokens.data_ptr(), num_rows, width, row_stride, dtype is _BF16
    )
    return highest, tokens
