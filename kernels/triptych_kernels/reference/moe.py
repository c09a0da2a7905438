"""Mixtures of experts, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels.ops import ExpertBiases, Experts
from triptych_kernels.quantized import ExpertWeights, stacked
from triptych_kernels.reference.activation import GATED_EXPERTS


class _ReferenceExperts:
    """Every expert over the tokens that chose it, expert by expert."""

    def __init__(
        self, gate_up: Tensor, down: Tensor, biases: ExpertBiases | None, gate: str, first_expert: int
    ) -> None:
        self._gate_up, self._down, self._first_expert = gate_up.contiguous(), down.contiguous(), first_expert
        self._biases, self._gate = biases, gate
        self.num_bytes = gate_up.nbytes + down.nbytes + (0 if biases is None else biases.num_bytes)
        self.expert_range = (first_expert, first_expert + gate_up.shape[0])

    def take(self, first: int, end: int) -> _ReferenceExperts:
        choices = expert_slice_of(self.expert_range, first, end)
        biases = None if self._biases is None else self._biases.part(choices)
        gate_up, down = self._gate_up[choices].clone(), self._down[choices].clone()
        return _ReferenceExperts(gate_up, down, biases, self._gate, first)

    def join(self, more: Experts) -> _ReferenceExperts:
        if not isinstance(more, _ReferenceExperts):
            raise ValueError(f"experts of {type(more).__name__} cannot follow those of the reference")
        check_follows(self.expert_range, more.expert_range)
        return _ReferenceExperts(
            torch.cat([self._gate_up, more._gate_up]),
            torch.cat([self._down, more._down]),
            joined_biases(self._biases, more._biases),
            self._gate,
            self._first_expert,
        )

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        parts = x.new_zeros(*expert_ids.shape, x.shape[-1], dtype=torch.float32)
        for index in range(self._gate_up.shape[0]):
            tokens, choices = (expert_ids == index + self._first_expert).nonzero(as_tuple=True)
            if tokens.numel():
                biases = self._biases
                added = (None, None) if biases is None else (biases.gate_up[index], biases.down[index])
                products = F.linear(x[tokens], self._gate_up[index], added[0])
                hidden = GATED_EXPERTS[self._gate](products)
                parts[tokens, choices] = F.linear(hidden, self._down[index], added[1]).float()
        return (parts * expert_weights[..., None].float()).sum(1).to(x.dtype)


def expert_slice_of(expert_range: tuple[int, int], first: int, end: int) -> slice:
    """Indices of experts first to end - 1 within a range. ValueError if not all are in the range."""
    if not expert_range[0] <= first < end <= expert_range[1]:
        raise ValueError(f"experts {first} to {end} are not all among {expert_range[0]} to {expert_range[1]}")
    return slice(first - expert_range[0], end - expert_range[0])


def check_follows(expert_range: tuple[int, int], following: tuple[int, int]) -> None:
    """ValueError if there is a gap between two ranges, or if they overlap."""
    if expert_range[1] != following[0]:
        raise ValueError(f"experts from {following[0]} on do not follow those up to {expert_range[1]}")


def joined_biases(biases: ExpertBiases | None, more: ExpertBiases | None) -> ExpertBiases | None:
    """Those of experts and of the ones that follow. ValueError if only some have any."""
    if biases is None or more is None:
        if biases is not more:
            raise ValueError("experts with biases cannot be joined with experts without")
        return None
    return ExpertBiases(torch.cat([biases.gate_up, more.gate_up]), torch.cat([biases.down, more.down]))


def pack_experts(
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    biases: ExpertBiases | None = None,
    gate: str = "silu",
    first_expert: int = 0,
    activations: str = "exact",
) -> _ReferenceExperts:
    """See ops.PackExperts. Rows are multiplied as they are."""
    return _ReferenceExperts(stacked(gate_up), stacked(down), biases, gate, first_expert)
