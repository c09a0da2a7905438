"""Gated activations, in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up, in fp32 and rounded once.  x: [T, 2 F], gates first.  Returns [T, F] in x's dtype."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)
