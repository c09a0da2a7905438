"""Replaces projections and experts of transformers' modules by ops whose weights are laid out once, at load.

Faster for few tokens than the plain call, and on a CPU a row's result is bitwise the same in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from triptych_kernels import REFERENCE, Experts, Linear, LowRank, Ops

_NUM_GATE_SAMPLES = 64
# Classes of experts that transformers' interface does not compute.
_OF_SCALED_TOKENS = frozenset({"Llama4TextExperts"})


def prepack_projections(model: nn.Module, ops: Ops, run: Callable[[], object]) -> int:
    """Replace every plain projection that `run`, a forward of `model`, calls; returns how many.

    Some models use a projection's weight without calling the projection: such projections are not replaced.
    """
    called = _called(model, run)
    packed_of: dict[int, PackedProjection] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = _weight_of(child)
            if weight is None or id(child) not in called:
                continue
            if id(child) not in packed_of:
                packed_of[id(child)] = PackedProjection(ops.pack_linear(weight, _bias_of(child)), weight)
            setattr(parent, name, packed_of[id(child)])
    return len(packed_of)


def _called(model: nn.Module, run: Callable[[], object]) -> set[int]:
    called: set[int] = set()

    def note(module: nn.Module, _arguments: object) -> None:
        called.add(id(module))

    hooks = [
        module.register_forward_pre_hook(note) for module in model.modules() if _weight_of(module) is not None
    ]
    run()
    for hook in hooks:
        hook.remove()
    return called


def _weight_of(module: nn.Module) -> Tensor | None:
    """[out_features, in_features] of a plain projection; None for any other module."""
    # A subclass may compute something else; only these exact classes are known to compute x W^T + b.
    if type(module) is nn.Linear:
        return module.weight.detach()
    if type(module) is Conv1D:
        return module.weight.detach().t()
    return None


def _bias_of(module: nn.Module) -> Tensor | None:
    return module.bias.detach() if isinstance(module.bias, Tensor) else None


class PackedProjection(nn.Module):
    """x W^T + b by a packed projection.

    `weight` is an empty tensor: some models read its dtype and device.
    """

    def __init__(self, linear: Linear, weight: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
        self._linear = linear
        self._low_rank: LowRank | None = None
        self._slots: Callable[[], Tensor | None] = _no_slots

    def add_low_rank(self, low_rank: LowRank, slots: Callable[[], Tensor | None]) -> None:
        """Add these from now on. slots: of the rows of the present call, see ForwardContext."""
        self._low_rank, self._slots = low_rank, slots

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] of the weight's dtype. Returns [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        slots = self._slots()
        if slots is None or self._low_rank is None:
            out = self._linear(rows)
        else:
            out = self._linear(rows, self._low_rank(rows, slots))
        return out.view(*x.shape[:-1], self.out_features)


def _no_slots() -> None:
    return None


def prepack_experts(model: nn.Module, ops: Ops) -> int:
    """Replace the experts that transformers' interface computes; returns the number of modules.

    Does nothing if `ops` are not batch-invariant.
    """
    if not ops.is_batch_invariant:
        return 0
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed = _packed(child, ops)
            if packed is not None:
                setattr(parent, name, packed)
                num_packed += 1
    return num_packed


def _packed(module: nn.Module, ops: Ops) -> nn.Module | None:
    """None for a module that is no experts module, and for experts that only transformers can compute."""
    if type(module).__name__ in _OF_SCALED_TOKENS:
        return _packed_of_scaled(module, ops)
    if not isinstance(module, _ByInterface) or hasattr(module, "post_expert_norm"):
        return None
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = _weights(module, up_name), _weights(module, "down_proj")
    gate: Callable[[Tensor], Tensor] = module._apply_gate if module.has_gate else module.act_fn  # type: ignore[assignment]
    packed: nn.Module
    if module.has_gate and not module.has_bias and _is_silu_and_mul(gate, up):
        packed = PackedExperts(ops.pack_experts(up, down))
    elif down.device.type == "cpu":
        up_bias, down_bias = _biases(module, up_name), _biases(module, "down_proj")
        packed = SingleExperts(
            [ops.pack_linear(weight, bias) for weight, bias in zip(up, up_bias, strict=True)],
            gate,
            [ops.pack_linear(weight, bias) for weight, bias in zip(down, down_bias, strict=True)],
        )
    else:
        # Only the GPU knows which experts were chosen, and a step must not wait for it.
        return None
    _drop_weights(module)
    return packed


def _packed_of_scaled(module: nn.Module, ops: Ops) -> nn.Module | None:
    up, down = (
        module.get_parameter(name).detach().transpose(1, 2).contiguous()
        for name in ("gate_up_proj", "down_proj")
    )
    activation = module.get_submodule("act_fn")

    def gate(x: Tensor) -> Tensor:
        gates, values = x.chunk(2, dim=-1)
        gated: Tensor = activation(gates) * values
        return gated

    if not _is_silu_and_mul(gate, up):
        return None
    _drop_weights(module)
    return ScaledTokensExperts(ops.pack_experts(up, down), len(up))


def _drop_weights(module: nn.Module) -> None:
    """Of a module that is replaced: what replaces it may keep a reference to it."""
    for name, _ in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, None)


@runtime_checkable
class _ByInterface(Protocol):
    """Experts that transformers' own interface computes; the attributes describe their weights.

    Without a gate, up_proj replaces gate_up_proj. With has_bias there are biases, whose names end in _bias.
    """

    has_gate: bool
    has_bias: bool
    is_transposed: bool
    num_experts: int
    down_proj: nn.Parameter


class PackedExperts(nn.Module):
    """Every expert in one op."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self._experts = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [T, hidden].  top_k_index, top_k_weights: [T, k].  Returns [T, hidden]."""
        return self._experts(hidden_states.contiguous(), top_k_index, top_k_weights.float())


class SingleExperts(nn.Module):
    """Computes one expert after the other, for gates of any kind."""

    def __init__(
        self, up: Sequence[Linear], gate: Callable[[Tensor], Tensor], down: Sequence[Linear]
    ) -> None:
        super().__init__()
        self._up, self._gate, self._down = up, gate, down

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts like PackedExperts.forward: ids of no expert add nothing."""
        parts = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1], dtype=torch.float32)
        for index in top_k_index.unique().tolist():
            if index < len(self._up):
                tokens, top_k_positions = (top_k_index == index).nonzero(as_tuple=True)
                gated = self._gate(self._up[index](hidden_states[tokens])).contiguous()
                parts[tokens, top_k_positions] = self._down[index](gated).float()
        return (parts * top_k_weights[..., None].float()).sum(1).to(hidden_states.dtype)


class ScaledTokensExperts(nn.Module):
    """Experts that each get all tokens, scaled by a router: to zero where it did not choose the expert."""

    def __init__(self, experts: Experts, num_experts: int) -> None:
        super().__init__()
        self._experts, self._num_experts = experts, num_experts

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [experts * T, hidden], the tokens of expert 0 first. Returns the same shape."""
        device, num_rows = hidden_states.device, len(hidden_states)
        expert_ids = torch.arange(num_rows, device=device) // (num_rows // self._num_experts)
        if device.type != "cpu":
            # Only the GPU knows which tokens are zero, and a step must not wait for it.
            return self._run(hidden_states, expert_ids)
        chosen = hidden_states.any(-1).nonzero().flatten()
        found = torch.zeros_like(hidden_states)
        found[chosen] = self._run(hidden_states[chosen], expert_ids[chosen])
        return found

    def _run(self, rows: Tensor, expert_ids: Tensor) -> Tensor:
        return self._experts(rows, expert_ids[:, None], torch.ones(len(rows), 1, device=rows.device))


def _weights(module: nn.Module, name: str) -> Tensor:
    """[E, outputs, inputs]."""
    weight = module.get_parameter(name).detach()
    return weight.transpose(1, 2).contiguous() if module.is_transposed else weight


def _biases(module: nn.Module, name: str) -> Sequence[Tensor | None]:
    if module.has_bias:
        return list(module.get_parameter(f"{name}_bias").detach())
    return [None] * len(module.get_parameter(name))


def _is_silu_and_mul(gate: Callable[[Tensor], Tensor], gate_up: Tensor) -> bool:
    """Whether the gate computes silu(gate) * up: its name would not reveal limits or factors."""
    # From small values to values beyond any limit.
    widths = torch.logspace(-2, 2, _NUM_GATE_SAMPLES, device=gate_up.device)[:, None]
    generator = torch.Generator(gate_up.device).manual_seed(0)
    sample = widths * torch.randn(
        _NUM_GATE_SAMPLES, gate_up.shape[1], generator=generator, device=gate_up.device
    )
    return torch.allclose(gate(sample), REFERENCE.silu_and_mul(sample), rtol=1e-4, atol=1e-6)
