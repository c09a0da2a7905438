"""Mixtures of experts, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels.reference.activation import silu_and_mul


class _ReferenceExperts:
    """Every expert over the tokens that chose it, expert by expert."""

    def __init__(self, gate_up: Tensor, down: Tensor, first_expert: int) -> None:
        self.num_bytes = gate_up.nbytes + down.nbytes
        self._gate_up, self._down, self._first_expert = gate_up.contiguous(), down.contiguous(), first_expert

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        parts = x.new_zeros(*expert_ids.shape, x.shape[-1], dtype=torch.float32)
        for index in range(self._gate_up.shape[0]):
            tokens, places = (expert_ids == index + self._first_expert).nonzero(as_tuple=True)
            if tokens.numel():
                hidden = silu_and_mul(F.linear(x[tokens], self._gate_up[index]))
                parts[tokens, places] = F.linear(hidden, self._down[index]).float()
        return (parts * expert_weights[..., None].float()).sum(1).to(x.dtype)


def pack_experts(gate_up: Tensor, down: Tensor, *, first_expert: int = 0) -> _ReferenceExperts:
    """See ops.PackExperts."""
    return _ReferenceExperts(gate_up, down, first_expert)
