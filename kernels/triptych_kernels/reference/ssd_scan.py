"""The state space recurrence of Mamba-2, in plain torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels.reference.state_rows import advance_rows
from triptych_kernels.state_batch import StateBatch


def ssd_scan(
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
    """S = e^(dt A) S + B (dt x)^T and y = C^T S + D x, token by token and head by head, in fp32.

    dt here is softplus(dt + dt_bias), within dt_limit.
    x: [T, H, P], dt: [T, H], B and C: [T, G, N], of one dtype, the last dimension contiguous; head h reads
    group h // (H / G).  A, D, dt_bias: [H] fp32.  states: [slots, H, N, P] fp32, contiguous, written.
    Returns [T, H, P] fp32, which a norm reads; what tokens without a row get is not defined.
    Source: Dao and Gu 2024, Transformers are SSMs, section 2 and listing 1.
    """
    share = x.shape[1] // B.shape[1]
    steps = F.softplus(dt.float() + dt_bias).clamp(*dt_limit)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)

    def advance(token: int, state: Tensor) -> Tensor:
        keys, queries = (matrix[token].float().repeat_interleave(share, 0) for matrix in (B, C))
        inputs, step = x[token].float(), steps[token]
        state = (step * A).exp()[:, None, None] * state
        state = state + keys[:, :, None] * (step[:, None] * inputs)[:, None]
        y = (queries[:, :, None] * state).sum(1)
        out[token] = y if D is None else y + D[:, None] * inputs
        return state

    advance_rows(states, batch, advance)
    return out
