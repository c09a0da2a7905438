"""Masks of tokens that may be chosen, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_mask(logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Set logits of forbidden tokens to -inf, in place.

    logits: [N, V] fp32.  mask: [M, ceil(V / 32)] int32; bit v % 32 of word v // 32 is 1 where v is allowed,
    and bits from V on mean nothing.  rows: [M] int64, distinct rows of the logits, one for each of the mask;
    None: all rows, M = N.
    """
    bits = torch.arange(32, device=mask.device)
    is_allowed = ((mask[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    if rows is None:
        logits.masked_fill_(~is_allowed, float("-inf"))
    else:
        logits[rows] = logits[rows].masked_fill(~is_allowed, float("-inf"))
