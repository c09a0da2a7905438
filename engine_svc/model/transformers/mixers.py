"""Replaces mixers of transformers' modules that keep a state per sequence by ops over the states of a step.

Knows the classes whose forward it replaces, by name; no cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_svc.model.context import ForwardContext
from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.facts import StateShape
from triptych_kernels import Ops, StateBatch

# The running step, or None outside of one.
Step = Callable[[], ForwardContext | None]


def has_known_mixer(model_class: type) -> bool:
    """Whether the layers with states of this class of transformers can be served."""
    return not _MIXERS.keys().isdisjoint(vars(sys.modules[model_class.__module__]))


def replace_mixers(model: nn.Module, ops: Ops, step: Step) -> tuple[StateShape, ...]:
    """Replace every mixer of a known class; returns the states that each keeps, in the model's order.

    Outside of a step a replaced mixer computes one whole sequence, as transformers' own does.
    Raises UnsupportedModel for a mixer of a known class with an activation that no op has.
    """
    shapes: list[StateShape] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            make = _MIXERS.get(type(child).__name__)
            if make is not None:
                mixer = make(child, ops, _LayerStates(step, len(shapes)))
                shapes.append(mixer.state_shape)
                setattr(parent, name, mixer)
    return tuple(shapes)


class _LayerStates:
    """The states of one layer in the running step."""

    def __init__(self, step: Step, index: int) -> None:
        self._step, self._index = step, index

    def of(self, x: Tensor, shape: StateShape) -> tuple[tuple[Tensor, ...], StateBatch]:
        """x: the step's tokens [T, ...]. Outside of a step they are a sequence whose states are not kept."""
        context = self._step()
        if context is not None:
            assert context.states is not None, "a step of a model with states has their slots"
            return context.state_layers[self._index], context.states
        states = tuple(x.new_empty(0, *part, dtype=torch.float32) for part in shape.parts)
        return states, StateBatch.of([len(x)], [len(x)], [-1], [-1], device=x.device)


class _Conv:
    """A module's depthwise convolution and its activation, with parameters as the op takes them."""

    def __init__(self, conv: nn.Conv1d, activation: object, ops: Ops) -> None:
        if activation not in ("silu", "swish"):
            raise UnsupportedModel(f"a convolution is followed by {activation!r}, not by silu")
        self._weight = conv.weight.detach().squeeze(1).t().float().contiguous()
        self._bias = None if conv.bias is None else conv.bias.detach().float()
        self._ops = ops
        width, channels = self._weight.shape
        self.state_shape = (width - 1, channels)

    def __call__(self, x: Tensor, states: Tensor, batch: StateBatch) -> Tensor:
        return self._ops.causal_conv(x, self._weight, self._bias, states, batch, silu=True)


class ScanMixer(nn.Module):
    """A mixer of Mamba-2: projections and norm are the module's own, under their names.

    mixer: of one of the classes below.  norm: in place of the module's.  project: of in_proj and the hidden
    states, where outputs of the projection are not used as they are.
    """

    def __init__(
        self,
        mixer: Any,  # Classes of several modules of transformers, which share names of attributes alone.
        ops: Ops,
        states: _LayerStates,
        norm: nn.Module | None = None,
        project: Callable[[nn.Module, Tensor], Tensor] = lambda projection, x: projection(x),
    ) -> None:
        super().__init__()
        self.in_proj, self.out_proj = mixer.in_proj, mixer.out_proj
        self.norm = mixer.norm if norm is None else norm
        self._project, self._ops, self._states = project, ops, states
        self._conv = _Conv(mixer.conv1d, mixer.activation, ops)
        self._heads = (mixer.num_heads, mixer.head_dim)
        self._groups = (mixer.n_groups, mixer.ssm_state_size)
        size, group_size = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
        self._projected = [size, size + 2 * group_size, mixer.num_heads]
        self._convolved = [size, group_size, group_size]
        self._rates = -mixer.A_log.detach().float().exp()
        self._skips = mixer.D.detach().float()
        self._bias = mixer.dt_bias.detach().float()
        self._limits = tuple(float(limit) for limit in mixer.time_step_limit)
        self.state_shape = StateShape(
            (self._conv.state_shape, (mixer.num_heads, mixer.ssm_state_size, mixer.head_dim))
        )

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """hidden_states: [1, T, hidden]. Returns the same shape."""
        gate, inputs, dt = self._project(self.in_proj, hidden_states)[0].split(self._projected, dim=-1)
        (kept, states), batch = self._states.of(inputs, self.state_shape)
        x, B, C = self._conv(inputs, kept, batch).split(self._convolved, dim=-1)
        y = self._ops.ssd_scan(
            x.unflatten(1, self._heads),
            dt,
            B.unflatten(1, self._groups),
            C.unflatten(1, self._groups),
            states,
            batch,
            A=self._rates,
            D=self._skips,
            dt_bias=self._bias,
            dt_limit=self._limits,
        )
        normed = self.norm(y.flatten(1)[None], gate[None])
        out: Tensor = self.out_proj(normed.to(hidden_states.dtype))
        return out


class _SiluGate(nn.Module):
    """In place of a gated norm that a model does without."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * F.silu(gate)


def _falcon_mixer(mixer: Any, ops: Ops, states: _LayerStates) -> ScanMixer:
    input_scale, output_scales = mixer.ssm_in_multiplier, mixer.mup_vector
    norm = None if mixer.mamba_rms_norm else _SiluGate()
    return ScanMixer(
        mixer, ops, states, norm, lambda projection, x: projection(x * input_scale) * output_scales
    )


# Of a mixer and hidden states [1, T, hidden]: queries with keys and values [T, C], gates [T, H E],
# a and b [T, H].
_ReadInputs = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


class DeltaMixer(nn.Module):
    """A mixer of the gated delta rule: projections and norm are the module's own, under their names.

    mixer: of one of the classes below.
    """

    norm: nn.Module
    out_proj: nn.Module

    def __init__(self, mixer: Any, ops: Ops, states: _LayerStates, read_inputs: _ReadInputs) -> None:
        super().__init__()
        for name, child in mixer.named_children():
            if child is not mixer.conv1d:
                self.add_module(name, child)
        self._read_inputs, self._ops, self._states = read_inputs, ops, states
        self._conv = _Conv(mixer.conv1d, mixer.activation, ops)
        self._keys = (mixer.num_k_heads, mixer.head_k_dim)
        self._values = (mixer.num_v_heads, mixer.head_v_dim)
        self._convolved = [mixer.key_dim, mixer.key_dim, mixer.value_dim]
        self._rates = -mixer.A_log.detach().float().exp()
        self._bias = mixer.dt_bias.detach().float()
        self.state_shape = StateShape(
            (self._conv.state_shape, (mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim))
        )

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """hidden_states: [1, T, hidden]. Returns the same shape."""
        inputs, gate, a, b = self._read_inputs(self, hidden_states)
        (kept, states), batch = self._states.of(inputs, self.state_shape)
        query, key, value = self._conv(inputs, kept, batch).split(self._convolved, dim=-1)
        attended = self._ops.gated_delta_rule(
            query.unflatten(1, self._keys),
            key.unflatten(1, self._keys),
            value.unflatten(1, self._values),
            a,
            b,
            states,
            batch,
            A=self._rates,
            dt_bias=self._bias,
        )
        normed = self.norm(attended.flatten(0, 1), gate.unflatten(1, self._values).flatten(0, 1))
        out: Tensor = self.out_proj(normed.view(*gate.shape)[None])
        return out


def _mixer_of_split_inputs(mixer: Any, ops: Ops, states: _LayerStates) -> DeltaMixer:
    """Queries, keys and values, gates, a and b have projections of their own."""

    def read_inputs(own: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return own.in_proj_qkv(x)[0], own.in_proj_z(x)[0], own.in_proj_a(x)[0], own.in_proj_b(x)[0]

    return DeltaMixer(mixer, ops, states, read_inputs)


def _mixer_of_joined_inputs(mixer: Any, ops: Ops, states: _LayerStates) -> DeltaMixer:
    """Two projections, with outputs ordered by key heads."""
    # The module's own reordering, of indices.
    numbers = (
        torch.arange(projection.out_features, device=projection.weight.device)[None, None]
        for projection in (mixer.in_proj_qkvz, mixer.in_proj_ba)
    )
    query, key, value, gate, b, a = (part.flatten() for part in mixer.fix_query_key_value_ordering(*numbers))
    inputs = torch.cat([query, key, value])

    def read_inputs(own: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkvz, ba = own.in_proj_qkvz(x)[0], own.in_proj_ba(x)[0]
        return qkvz[:, inputs], qkvz[:, gate], ba[:, a], ba[:, b]

    return DeltaMixer(mixer, ops, states, read_inputs)


_MIXERS: Mapping[str, Callable[[nn.Module, Ops, _LayerStates], ScanMixer | DeltaMixer]] = {
    "Mamba2Mixer": ScanMixer,
    "BambaMixer": ScanMixer,
    "GraniteMoeHybridMambaLayer": ScanMixer,
    "NemotronHMamba2Mixer": ScanMixer,
    "FalconH1Mixer": _falcon_mixer,
    "Qwen3NextGatedDeltaNet": _mixer_of_joined_inputs,
    "Qwen3_5GatedDeltaNet": _mixer_of_split_inputs,
    "Qwen3_5MoeGatedDeltaNet": _mixer_of_split_inputs,
}
