"""Ops that keep a state per row, by native kernels.

Each computes what its reference does, for bf16 and fp32 inputs; other dtypes and layouts go to the reference
itself. Knows tensors and addresses; the arithmetic is in states.cpp, compiled for each instruction set (isa).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych_kernels.cpu.loader import Isa
from triptych_kernels.reference import REFERENCE
from triptych_kernels.state_batch import StateBatch

_BF16, _FP32 = torch.bfloat16, torch.float32
_DTYPES = (_BF16, _FP32)
_ADDRESSES = "cpu addresses"


def causal_conv(
    isa: Isa,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    batch: StateBatch,
    *,
    silu: bool,
) -> Tensor:
    """See the reference.  ValueError, and nothing written, for slots and tokens that do not fit."""
    dtype, (num_tokens, num_channels), (stride, last) = x.dtype, x.shape, x.stride()
    parameters = (weight,) if bias is None else (weight, bias)
    if dtype not in _DTYPES or last != 1 or not _are_plain(states, *parameters):
        return REFERENCE.causal_conv(x, weight, bias, states, batch, silu=silu)
    width = weight.shape[0]
    if (
        weight.shape != (width, num_channels)
        or states.shape[1:] != (width - 1, num_channels)
        or (bias is not None and bias.shape != (num_channels,))
    ):
        raise ValueError(
            f"weight {tuple(weight.shape)} and states {tuple(states.shape)} do not fit"
            f" {num_channels} channels"
        )
    out = torch.empty((num_tokens, num_channels), dtype=dtype)
    isa.native.causal_conv(
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), states.data_ptr(),
        out.data_ptr(), stride, num_tokens, num_channels, width, silu, dtype is _BF16,
        *_numbers(batch, num_tokens), len(states),
    )  # fmt: skip
    return out


def ssd_scan(
    isa: Isa,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    batch: StateBatch,
    *,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """See the reference.  ValueError, and nothing written, for slots and tokens that do not fit."""
    parameters = (A, dt_bias) if D is None else (A, dt_bias, D)
    if not _have_rows(x, dt, B, C) or not _are_plain(states, *parameters):
        return REFERENCE.ssd_scan(x, dt, B, C, states, batch, A=A, D=D, dt_bias=dt_bias, dt_limit=dt_limit)
    (num_tokens, num_heads, head_dim), (_, num_groups, size) = x.shape, B.shape
    _check_heads(num_heads, num_groups, (dt, *parameters))
    if states.shape[1:] != (num_heads, size, head_dim) or C.shape != B.shape or len(B) != num_tokens:
        raise ValueError(
            f"states {tuple(states.shape)} do not fit x {tuple(x.shape)}, B {tuple(B.shape)},"
            f" C {tuple(C.shape)}"
        )
    # The kernel's result has the dtype of its inputs; to widen them is little beside the states.
    x, dt, B, C = (tensor.float() for tensor in (x, dt, B, C))
    out = torch.empty(x.shape, dtype=_FP32)
    isa.native.ssd_scan(
        x.data_ptr(), dt.data_ptr(), B.data_ptr(), C.data_ptr(), states.data_ptr(), out.data_ptr(),
        A.data_ptr(), 0 if D is None else D.data_ptr(), dt_bias.data_ptr(),
        x.stride(0), x.stride(1), dt.stride(0), B.stride(0), B.stride(1), C.stride(0), C.stride(1),
        num_tokens, num_heads, num_groups, size, head_dim, False,
        *_numbers(batch, num_tokens), len(states), *dt_limit,
    )  # fmt: skip
    return out


def gated_delta_rule(
    isa: Isa,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    states: Tensor,
    batch: StateBatch,
    *,
    A: Tensor,
    dt_bias: Tensor,
) -> Tensor:
    """See the reference.  ValueError, and nothing written, for slots and tokens that do not fit."""
    if not _have_rows(query, key, value, a, b) or not _are_plain(states, A, dt_bias):
        return REFERENCE.gated_delta_rule(query, key, value, a, b, states, batch, A=A, dt_bias=dt_bias)
    (num_tokens, num_heads, value_dim), (_, num_groups, key_dim) = value.shape, key.shape
    _check_heads(num_heads, num_groups, (a, b, A, dt_bias))
    if (
        states.shape[1:] != (num_heads, key_dim, value_dim)
        or query.shape != key.shape
        or len(key) != num_tokens
    ):
        raise ValueError(
            f"states {tuple(states.shape)} do not fit query {tuple(query.shape)}, key {tuple(key.shape)},"
            f" value {tuple(value.shape)}"
        )
    out = torch.empty(value.shape, dtype=value.dtype)
    isa.native.gated_delta_rule(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), a.data_ptr(), b.data_ptr(),
        states.data_ptr(), out.data_ptr(), A.data_ptr(), dt_bias.data_ptr(),
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        a.stride(0), b.stride(0),
        num_tokens, num_heads, num_groups, key_dim, value_dim, value.dtype is _BF16,
        *_numbers(batch, num_tokens), len(states),
    )  # fmt: skip
    return out


def _are_plain(*tensors: Tensor) -> bool:
    """Whether all are fp32 and contiguous."""
    return all(tensor.dtype is _FP32 and tensor.is_contiguous() for tensor in tensors)


def _have_rows(*tensors: Tensor) -> bool:
    """Whether all have one dtype that there are kernels for, and a contiguous last dimension."""
    dtype = tensors[0].dtype
    return dtype in _DTYPES and all(tensor.dtype is dtype and tensor.stride(-1) == 1 for tensor in tensors)


def _check_heads(num_heads: int, num_groups: int, per_head: tuple[Tensor, ...]) -> None:
    if num_heads % num_groups:
        raise ValueError(f"{num_heads} heads do not share {num_groups} groups")
    for tensor in per_head:
        if tensor.shape[-1] != num_heads:
            raise ValueError(f"{tuple(tensor.shape)} is not a number for each of {num_heads} heads")


def _numbers(batch: StateBatch, num_tokens: int) -> tuple[int, ...]:
    """The kernel's arguments for a batch: the same for all layers."""
    if len(batch.write_slots) != num_tokens:
        raise ValueError(f"{len(batch.write_slots)} write_slots for {num_tokens} tokens")
    return (batch.derived.get(_ADDRESSES) or _addresses(batch))[0]  # type: ignore[index]  # Ours alone.


def _addresses(batch: StateBatch) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """The arguments, kept together with the tensors whose addresses they contain."""
    tensors = tuple(
        tensor.to(torch.int32).contiguous()
        for tensor in (batch.query_starts, batch.read_slots, batch.write_slots)
    )
    if len(tensors[0]) != len(tensors[1]) + 1:
        raise ValueError(f"{len(tensors[0])} query_starts for {len(tensors[1])} rows")
    numbers = (*(tensor.data_ptr() for tensor in tensors), len(tensors[1]))
    batch.derived[_ADDRESSES] = made = numbers, tensors
    return made
