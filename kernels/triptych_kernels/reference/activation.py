"""Gated activations, in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


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


# By the names that pack_gated_linear takes.
GATED = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
