"""Low-rank additions to projections, a different one for each token, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def lora_shrink(x: Tensor, weights: Tensor, adapter_ids: Tensor) -> Tensor:
    """x A^T of each token's own adapter.

    x: [T, hidden].  weights: [adapters, rank, hidden].  adapter_ids: [T] int32 or int64, -1 is none: 0.
    Returns [T, rank] fp32.
    """
    chosen = weights[adapter_ids.long().clamp(min=0)]
    product = torch.einsum("th,trh->tr", x.float(), chosen.float())
    return product.masked_fill((adapter_ids < 0)[:, None], 0.0)


def lora_expand(x: Tensor, weights: Tensor, adapter_ids: Tensor, scales: Tensor, out: Tensor) -> None:
    """out += scale * x B^T of each token's own adapter, in place.

    x: [T, rank] fp32.  weights: [adapters, N, rank].  adapter_ids: [T], -1 adds nothing.
    scales: [adapters] fp32.  out: [T, N], added to in its dtype after the product in fp32.
    """
    safe = adapter_ids.long().clamp(min=0)
    product = torch.einsum("tr,tnr->tn", x, weights[safe].float()) * scales[safe][:, None]
    out.add_(product.masked_fill_((adapter_ids < 0)[:, None], 0.0).to(out.dtype))
