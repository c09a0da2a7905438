"""Depthwise convolution over the last tokens of a row, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels.reference.state_rows import advance_rows
from triptych_kernels.state_batch import StateBatch


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: StateBatch, *, silu: bool
) -> Tensor:
    """y[t] = bias + sum over k of weight[k] * x[t - W + 1 + k], channel by channel, in fp32.

    With `silu`, the result is silu(y).
    x: [T, C], rows contiguous.  weight: [W, C] fp32, contiguous: the last one is of the token itself.
    bias: [C] fp32.  states: [slots, W - 1, C] fp32, contiguous, written: a row's last inputs, oldest first.
    Returns [T, C] in x's dtype; what tokens without a row get is not defined.
    """
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)

    def step(token: int, state: Tensor) -> Tensor:
        inputs = torch.cat([state, x[token].float()[None]])
        total = (weight * inputs).sum(0)
        if bias is not None:
            total = total + bias
        out[token] = F.silu(total) if silu else total
        return inputs[1:]

    advance_rows(states, batch, step)
    return out
