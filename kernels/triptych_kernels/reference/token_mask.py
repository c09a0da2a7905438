"""Masks of tokens that may be chosen, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_mask(logits: Tensor, mask: Tensor) -> None:
    """Set logits of forbidden tokens to -inf, in place.

    logits: [N, V] fp32.  mask: [N, ceil(V / 32)] int32; bit v % 32 of word v // 32 is 1 where v is allowed.
    """
    bits = torch.arange(32, device=mask.device)
    is_allowed = ((mask[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(~is_allowed, float("-inf"))
