"""Norms, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight, row by row, in fp32 up to one rounding at the end.

    x: [..., hidden].  weight: [hidden].  Returns x's shape and dtype.
    Source: Zhang and Sennrich 2019, eq. 4.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x, in place and rounded to its dtype; returns rms_norm(residual).

    x, residual: [T, hidden] of one dtype.
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps)
