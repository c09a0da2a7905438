"""Gated activations, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CLAMP, SWIGLU_ALPHA = 7.0, 1.702  # of clamped_swiglu


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up, in fp32 and rounded once.  x: [T, 2 F], gates first.  Returns [T, F] in x's dtype."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """gelu(gate) * up, gelu in its approximation by tanh; otherwise as silu_and_mul.

    Source: Hendrycks and Gimpel 2016, section 2.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def sigmoid_and_mul(x: Tensor) -> Tensor:
    """sigmoid(gate) * up; otherwise as silu_and_mul."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.sigmoid(gate) * up).to(x.dtype)


def clamped_swiglu(x: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1), gates up to 7, ups from -7 to 7; otherwise as silu_and_mul.

    Source: OpenAI 2025, gpt-oss, torch/model.py: swiglu.
    """
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return (gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1.0)).to(x.dtype)


# By the names that pack_gated_linear takes, and that pack_experts takes.
GATED = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
GATED_EXPERTS = {"silu": silu_and_mul, "clamped_swiglu": clamped_swiglu}
