"""Mixtures of experts by the native kernels. A token's result has the same bits in every batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triptych_kernels.cpu.codes import Codes, find_codes
from triptych_kernels.cpu.linear import Packed, address_of, alternating, in_panels, log_dequantized, pack
from triptych_kernels.cpu.loader import Isa
from triptych_kernels.cpu.panel_memory import PanelMemory
from triptych_kernels.ops import ExpertBiases, Experts
from triptych_kernels.quantized import ExpertWeights, QuantizedWeight, Weight, as_tensor
from triptych_kernels.reference import REFERENCE
from triptych_kernels.reference.moe import check_follows, expert_slice_of

_DTYPES = (torch.bfloat16, torch.float32)
_ID_DTYPES = (torch.int32, torch.int64)
_GATES = {"silu": 0, "clamped_swiglu": 2}  # as numbered in vector_math.h


class NativeExperts:
    """Computes every chosen expert for the tokens that chose it; other experts are not read."""

    __slots__ = (
        "_downs", "_dtype", "_gate", "_gate_ups", "_hidden", "_isa", "_plan", "expert_range", "num_bytes",
    )  # fmt: skip

    def __init__(
        self,
        isa: Isa,
        gate_ups: Sequence[Packed],
        downs: Sequence[Packed],
        *,
        dtype: torch.dtype,
        first_expert: int,
        gate: str = "silu",
    ) -> None:
        """gate_ups, downs: of each expert, from [2 F, hidden], `alternating`, and from [hidden, F].

        isa: the instruction set of the kernels.
        """
        self._isa, self._dtype, self._hidden = isa, dtype, downs[0].num_rows
        self._gate_ups, self._downs, self._gate = gate_ups, downs, gate
        self.expert_range = (first_expert, first_expert + len(downs))
        self.num_bytes = sum(packed.num_bytes for packed in (*gate_ups, *downs))
        numbers: list[int] = []
        for packed in (each for pair in zip(gate_ups, downs, strict=True) for each in pair):
            read = (packed.panels, packed.bias, packed.scales, packed.table)
            numbers += [*packed.layout, *map(address_of, read), packed.base]
        with_amx = isa.with_amx and dtype is torch.bfloat16
        self._plan = isa.native.make_experts(
            dtype is torch.float32, first_expert, with_amx, _GATES[gate], *numbers
        )

    def take(self, first: int, end: int) -> NativeExperts:
        experts = expert_slice_of(self.expert_range, first, end)
        return self._copied(self._gate_ups[experts], self._downs[experts], first)

    def join(self, more: Experts) -> NativeExperts:
        if not isinstance(more, NativeExperts) or self._form != more._form:
            raise ValueError(f"experts of {type(more).__name__} cannot follow these of another kind or shape")
        check_follows(self.expert_range, more.expert_range)
        gate_ups, downs = [*self._gate_ups, *more._gate_ups], [*self._downs, *more._downs]
        return self._copied(gate_ups, downs, self.expert_range[0])

    @property
    def arguments(self) -> dict[str, object]:
        """Those of the constructor by name, but for the instruction set."""
        return {
            "gate_ups": self._gate_ups,
            "downs": self._downs,
            "dtype": self._dtype,
            "first_expert": self.expert_range[0],
            "gate": self._gate,
        }

    @property
    def _form(self) -> tuple[object, ...]:
        return self._isa, self._dtype, self._gate, self._hidden, self._downs[0].num_columns

    def _copied(
        self, gate_ups: Sequence[Packed], downs: Sequence[Packed], first_expert: int
    ) -> NativeExperts:
        memory = PanelMemory()
        copies = [[_copied(packed, memory) for packed in projections] for projections in (gate_ups, downs)]
        return NativeExperts(
            self._isa, *copies, dtype=self._dtype, first_expert=first_expert, gate=self._gate
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
    isa: Isa,
    gate_ups: ExpertWeights,
    downs: ExpertWeights,
    *,
    biases: ExpertBiases | None = None,
    gate: str = "silu",
    first_expert: int = 0,
    activations: str = "exact",
) -> Experts:
    """See ops.PackExperts.  bf16, fp32 and codes; other dtypes are served by the reference.

    isa: the instruction set of the kernels.
    """
    sizes, down_sizes = _shape_of(gate_ups), _shape_of(downs)
    dtypes = {weight.dtype for weight in (*gate_ups, *downs)}
    if len(sizes) != 3 or len(down_sizes) != 3 or len(dtypes) != 1:
        raise ValueError(
            f"gate_up is {gate_ups[0].dtype} {sizes}, down {downs[0].dtype} {down_sizes}: "
            "expected [E, 2 F, hidden] and [E, hidden, F] in one dtype"
        )
    num_experts, hidden, ffn = down_sizes
    if sizes != (num_experts, 2 * ffn, hidden) or 0 in down_sizes:
        raise ValueError(
            f"gate_up has shape {sizes}, down {down_sizes}: "
            "expected [E, 2 F, hidden] and [E, hidden, F], none of them 0"
        )
    if biases is not None:
        shapes = tuple(biases.gate_up.shape), tuple(biases.down.shape)
        if shapes != ((num_experts, 2 * ffn), (num_experts, hidden)):
            raise ValueError(
                f"biases have shapes {shapes}, expected {(num_experts, 2 * ffn)}, {(num_experts, hidden)}"
            )
    (dtype,) = dtypes
    if dtype not in _DTYPES or gate_ups[0].device.type != "cpu":
        return REFERENCE.pack_experts(gate_ups, downs, biases=biases, gate=gate, first_expert=first_expert)
    # Of these experts alone, so that it is free again when they are.
    memory = PanelMemory()
    no_bias: list[Tensor | None] = [None] * num_experts
    gate_up_biases, down_biases = no_bias, no_bias
    if biases is not None:
        gate_up_biases, down_biases = list(biases.gate_up), list(biases.down)
    return NativeExperts(
        isa,
        [
            _packed(isa, weight, bias, memory, activations, is_gated=True)
            for weight, bias in zip(gate_ups, gate_up_biases, strict=True)
        ],
        [
            _packed(isa, weight, bias, memory, activations, is_gated=False)
            for weight, bias in zip(downs, down_biases, strict=True)
        ],
        dtype=dtype,
        first_expert=first_expert,
        gate=gate,
    )


def _shape_of(weights: ExpertWeights) -> tuple[int, ...]:
    return tuple(weights.shape) if isinstance(weights, Tensor) else (len(weights), *weights[0].shape)


def _packed(
    isa: Isa, weight: Weight, bias: Tensor | None, memory: PanelMemory, activations: str, *, is_gated: bool
) -> Packed:
    """is_gated: the rows are gates over ups, and are to alternate."""

    def in_order(rows: Tensor) -> Tensor:
        return alternating(isa, rows.detach()) if is_gated else rows.detach()

    def packed(rows: Tensor | Codes) -> Packed:
        made = pack(isa, rows, memory)
        if bias is None:
            return made
        return replace(made, bias=in_panels(isa, in_order(bias[:, None])[:, 0]))

    if isinstance(weight, QuantizedWeight) and weight.groups is None:
        found = find_codes(isa, weight, activations)
        if not isinstance(found, str):
            return packed(found.by_rows(in_order))
        log_dequantized(found)
    elif not isinstance(weight, Tensor):
        log_dequantized("experts whose inputs have an order, or whose gates and ups differ in kind")
    return packed(in_order(as_tensor(weight)))


def _copied(packed: Packed, memory: PanelMemory) -> Packed:
    panels = memory.take(packed.panels.nbytes)
    panels.copy_(packed.panels)
    return replace(packed, panels=panels)
