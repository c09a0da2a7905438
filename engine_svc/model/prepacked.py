"""Projections with weights laid out for the CPU's matrix kernels once, at load, instead of in every call.

About twice as fast as the plain call for few tokens, and a row's result is bitwise the same in every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# The layout is chosen for this many rows; it serves any number.
_EXPECTED_ROWS = 32


class PrepackedLinear(nn.Module):
    """x W^T + b with W packed. `weight` is an empty tensor: some models ask for its dtype and device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
        self._bias = None if bias is None else bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _EXPECTED_ROWS)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] of the weight's dtype. Returns [..., out_features]."""
        product: Tensor = self._multiply(x, self._packed, self._bias, "none", [], "")
        return product


def can_prepack(dtype: torch.dtype) -> bool:
    """Whether this CPU's matrix library takes packed weights of this dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def prepack_projections(model: nn.Module) -> int:
    """Replace every plain projection in `model` by a prepacked one and drop its weight; returns how many."""
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed = _packed(child)
            if packed is not None:
                setattr(parent, name, packed)
                num_packed += 1
    return num_packed


def _packed(module: nn.Module) -> PrepackedLinear | None:
    # Subclasses compute something else; only the exact classes are known to be x W^T + b.
    if type(module) is nn.Linear and can_prepack(module.weight.dtype):
        return PrepackedLinear(module.weight, module.bias)
    if type(module) is Conv1D and can_prepack(module.weight.dtype):
        return PrepackedLinear(module.weight.t(), module.bias)
    return None
