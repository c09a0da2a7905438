"""Linear attention whose state forgets and is corrected, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels.reference.state_rows import advance_rows
from triptych_kernels.state_batch import StateBatch

NORM_EPS = 1e-6


def gated_delta_rule(
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
    """S = g S, then S = S + k (beta (v - S^T k))^T and o = S^T q, token by token and head by head, in fp32.

    g = e^(A softplus(a + dt_bias)) and beta = sigmoid(b); q and k are divided by their lengths,
    sqrt(sum of squares + 1e-6), and q also by sqrt(D).
    query, key: [T, G, D], value: [T, H, E], a, b: [T, H], of one dtype, the last dimension contiguous; head h
    reads key head h // (H / G).  A, dt_bias: [H] fp32.  states: [slots, H, D, E] fp32, contiguous, written.
    Returns [T, H, E] in the value's dtype; what tokens without a row get is not defined.
    Source: Yang et al. 2024, Gated Delta Networks, eq. 10.
    """
    share = value.shape[1] // key.shape[1]
    decays = (A * F.softplus(a.float() + dt_bias)).exp()
    rates = b.float().sigmoid()
    out = torch.zeros(value.shape, dtype=value.dtype, device=value.device)

    def advance(token: int, state: Tensor) -> Tensor:
        queries, keys = (_normed(matrix[token]).repeat_interleave(share, 0) for matrix in (query, key))
        state = decays[token][:, None, None] * state
        known = (keys[:, :, None] * state).sum(1)
        change = rates[token][:, None] * (value[token].float() - known)
        state = state + keys[:, :, None] * change[:, None]
        out[token] = (queries[:, :, None] * state).sum(1) * key.shape[2] ** -0.5
        return state

    advance_rows(states, batch, advance)
    return out


def _normed(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)
