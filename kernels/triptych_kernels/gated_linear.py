"""A gated projection made of two ops, for devices without a fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from triptych_kernels.ops import Linear


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """The activation of gates times ups, of a projection to both."""

    gate_up: Linear
    activate: Callable[[Tensor], Tensor]  # [T, 2 F] to [T, F]

    @property
    def in_features(self) -> int:
        return self.gate_up.in_features

    @property
    def out_features(self) -> int:
        return self.gate_up.out_features // 2

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """See ops.Linear. addend: [T, 2 out_features] fp32, of gates, then ups."""
        return self.activate(self.gate_up(x, addend))
