"""Mixtures of experts by the native kernels. A token's result has the same bits in every batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from triptych_kernels.cpu.linear import alternating, pack_panels, packed_bytes
from triptych_kernels.cpu.loader import Isa
from triptych_kernels.cpu.panel_memory import own_panels
from triptych_kernels.ops import Experts
from triptych_kernels.quantized import ExpertWeights, stacked
from triptych_kernels.reference import REFERENCE
from triptych_kernels.reference.moe import check_follows, expert_slice_of

_DTYPES = (torch.bfloat16, torch.float32)
_ID_DTYPES = (torch.int32, torch.int64)


class NativeExperts:
    """Computes every chosen expert for the tokens that chose it; other experts are not read."""

    __slots__ = ("_dtype", "_ffn", "_hidden", "_isa", "_plan", "_tensors", "expert_range", "num_bytes")

    def __init__(
        self,
        isa: Isa,
        gate_up_panels: Tensor,
        down_panels: Tensor,
        *,
        dtype: torch.dtype,
        hidden: int,
        ffn: int,
        first_expert: int,
    ) -> None:
        """gate_up_panels, down_panels: [E, bytes], contiguous and 64-byte aligned, packed from [2 F, hidden]
        and [hidden, F] of each expert.  isa: the instruction set of the kernels.
        """
        num_experts = len(down_panels)
        self._isa, self._dtype, self._hidden, self._ffn = isa, dtype, hidden, ffn
        self._tensors = (gate_up_panels, down_panels)
        self.expert_range = (first_expert, first_expert + num_experts)
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)
        self._plan = isa.native.make_experts(
            dtype is torch.float32,
            num_experts,
            first_expert,
            hidden,
            ffn,
            gate_up_panels.data_ptr(),
            down_panels.data_ptr(),
            isa.with_amx and dtype is torch.bfloat16,
        )

    def take(self, first: int, end: int) -> NativeExperts:
        expert_slice = expert_slice_of(self.expert_range, first, end)
        return self._like_these([[panels[expert_slice]] for panels in self._tensors], first)

    def join(self, more: Experts) -> NativeExperts:
        if not isinstance(more, NativeExperts) or self._form != more._form:
            raise ValueError(f"experts of {type(more).__name__} cannot follow these of another kind or shape")
        check_follows(self.expert_range, more.expert_range)
        return self._like_these([list(pair) for pair in zip(self._tensors, more._tensors, strict=True)])

    @property
    def _form(self) -> tuple[torch.dtype, int, int, Isa]:
        return self._dtype, self._hidden, self._ffn, self._isa

    def _like_these(self, parts: list[list[Tensor]], first_expert: int | None = None) -> NativeExperts:
        return NativeExperts(
            self._isa,
            *(_stacked(part) for part in parts),
            dtype=self._dtype,
            hidden=self._hidden,
            ffn=self._ffn,
            first_expert=self.expert_range[0] if first_expert is None else first_expert,
        )

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """See ops.Experts.  x: rows contiguous, on the CPU, in the dtype of the weights."""
        num_tokens, width = x.shape
        row_stride, stride = x.stride()
        if width != self._hidden or x.dtype is not self._dtype or (stride != 1 and width > 1) or not x.is_cpu:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}: "
                f"expected {self._dtype} [T, {self._hidden}] on the CPU, its last dimension contiguous"
            )
        if (
            expert_ids.dtype not in _ID_DTYPES
            or expert_weights.dtype is not torch.float32
            or expert_ids.dim() != 2
            or expert_ids.shape[0] != num_tokens
            or expert_weights.shape != expert_ids.shape
        ):
            raise ValueError(
                f"expert_ids are {expert_ids.dtype} {tuple(expert_ids.shape)}, "
                f"expert_weights {expert_weights.dtype} {tuple(expert_weights.shape)}: "
                f"expected integers and fp32, both [{num_tokens}, k]"
            )
        expert_ids, expert_weights = expert_ids.contiguous(), expert_weights.contiguous()
        out = torch.empty((num_tokens, width), dtype=self._dtype)
        self._isa.native.experts(
            self._plan,
            x.data_ptr(),
            row_stride,
            expert_ids.data_ptr(),
            expert_ids.dtype is torch.int64,
            expert_weights.data_ptr(),
            out.data_ptr(),
            num_tokens,
            expert_ids.shape[1],
        )
        return out


def pack_experts(
    isa: Isa, gate_ups: ExpertWeights, downs: ExpertWeights, *, first_expert: int = 0
) -> Experts:
    """See ops.PackExperts.  bf16 and fp32; other dtypes are served by the reference.

    isa: the instruction set of the kernels.
    """
    gate_up, down = stacked(gate_ups), stacked(downs)
    if gate_up.dim() != 3 or down.dim() != 3 or down.dtype != gate_up.dtype:
        raise ValueError(
            f"gate_up is {gate_up.dtype} {tuple(gate_up.shape)}, down {down.dtype} {tuple(down.shape)}: "
            "expected [E, 2 F, hidden] and [E, hidden, F] in one dtype"
        )
    num_experts, hidden, ffn = down.shape
    if gate_up.shape != (num_experts, 2 * ffn, hidden) or not down.numel():
        raise ValueError(
            f"gate_up has shape {tuple(gate_up.shape)}, down {tuple(down.shape)}: "
            "expected [E, 2 F, hidden] and [E, hidden, F], none of them 0"
        )
    if gate_up.dtype not in _DTYPES or not gate_up.is_cpu:
        return REFERENCE.pack_experts(gate_up, down, first_expert=first_expert)
    return NativeExperts(
        isa,
        _packed(isa, num_experts, (alternating(isa, weight) for weight in gate_up.detach())),
        _packed(isa, num_experts, iter(down.detach())),
        dtype=gate_up.dtype,
        hidden=hidden,
        ffn=ffn,
        first_expert=first_expert,
    )


def _packed(isa: Isa, num_experts: int, weights: Iterator[Tensor]) -> Tensor:
    """[E, bytes] of E weights of one shape."""
    first = next(weights)
    num_bytes = packed_bytes(isa, first)
    panels = own_panels(num_experts * num_bytes).view(-1, num_bytes)
    for out, weight in zip(panels, itertools.chain([first], weights), strict=True):
        pack_panels(isa, weight, out)
    return panels


def _stacked(parts: list[Tensor]) -> Tensor:
    """[E, bytes] of several [.., bytes], one after the other in new memory."""
    stacked = own_panels(sum(part.nbytes for part in parts)).view(-1, parts[0].shape[1])
    return torch.cat(parts, out=stacked)
