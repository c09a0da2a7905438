"""Gated activations as Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS_PER_PROGRAM = 1024


@triton.jit
def _gate_and_mul_kernel(x_ptr, out_ptr, x_stride, num_features, GATE: tl.constexpr, BLOCK_F: tl.constexpr):
    """BLOCK_F features of one token."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_feature = feature < num_features
    x_start = x_ptr + token * x_stride + feature
    gate = tl.load(x_start, mask=is_feature, other=0.0).to(tl.float32)
    up = tl.load(x_start + num_features, mask=is_feature, other=0.0).to(tl.float32)
    # Gates are x / (1 + e^-t): gelu by tanh too, as 1 + tanh(t / 2) = 2 / (1 + e^-t).
    exponent, opened = gate, gate
    if GATE == "gelu_tanh":
        exponent = gate * (1.5957691216 + 0.0713548163 * gate * gate)
    if GATE == "sigmoid":
        opened = 1.0
    product = opened / (1.0 + tl.exp(-exponent)) * up
    out_start = out_ptr + token * num_features + feature
    tl.store(out_start, product.to(out_ptr.dtype.element_ty), mask=is_feature)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up, in fp32 and rounded once.

    x: [T, 2 F], gates first, rows contiguous.  Returns [T, F] in x's dtype.
    """
    return _gate_and_mul(x, "silu")


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """gelu(gate) * up, gelu in its approximation by tanh; otherwise as silu_and_mul."""
    return _gate_and_mul(x, "gelu_tanh")


def sigmoid_and_mul(x: Tensor) -> Tensor:
    """sigmoid(gate) * up; otherwise as silu_and_mul."""
    return _gate_and_mul(x, "sigmoid")


# By the names that pack_gated_linear takes.
GATED = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


def _gate_and_mul(x: Tensor, gate: str) -> Tensor:
    num_tokens, width = x.shape
    if width % 2 or x.stride(1) != 1:
        raise ValueError(
            f"x is {tuple(x.shape)} with strides {x.stride()}, not rows of gates and as many ups"
        )
    num_features = width // 2
    out = torch.empty(num_tokens, num_features, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block = min(_NUMBERS_PER_PROGRAM, triton.next_power_of_2(num_features))
    grid = (num_tokens, triton.cdiv(num_features, block))
    _gate_and_mul_kernel[grid](x, out, x.stride(0), num_features, GATE=gate, BLOCK_F=block)
    return out
