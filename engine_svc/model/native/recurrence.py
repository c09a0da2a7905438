"""Mixers of a native decoder layer that keep a state for each row, in place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_svc.model.context import ForwardContext
from engine_svc.model.facts import StateShape
from engine_svc.model.native.layers import Projection
from triptych_kernels import Ops, StateBatch


@dataclass(frozen=True, slots=True)
class Convolution:
    """What channels read of the last tokens of their row, and silu of it."""

    ops: Ops
    weight: Tensor  # [W, C] fp32, see the op
    bias: Tensor | None  # [C] fp32

    @property
    def state_shape(self) -> tuple[int, ...]:
        width, num_channels = self.weight.shape
        return width - 1, num_channels

    def __call__(self, x: Tensor, states: Tensor, batch: StateBatch) -> Tensor:
        """x: [T, C].  states: of all slots, written."""
        return self.ops.causal_conv(x, self.weight, self.bias, states, batch, silu=True)


@dataclass(slots=True)
class DeltaRule:
    """Linear attention by the gated delta rule; its heads are normed and gated."""

    ops: Ops
    layer: int  # index among this rank's layers with states
    inputs: Projection  # queries, keys and values; gates; b; a
    convolution: Convolution
    out: Projection
    num_key_heads: int  # on this rank, as num_heads
    key_dim: int
    num_heads: int
    head_dim: int
    rates: Tensor  # A of the op, as dt_bias
    dt_bias: Tensor
    norm: Tensor  # [head_dim]
    eps: float

    @property
    def state_shape(self) -> StateShape:
        return StateShape((self.convolution.state_shape, (self.num_heads, self.key_dim, self.head_dim)))

    @property
    def projections(self) -> Sequence[Projection]:
        return self.inputs, self.out

    def __call__(
        self, x: Tensor, positions: Tensor, cos_sin: Tensor, context: ForwardContext, rows: Tensor | None
    ) -> Tensor:
        batch = _batch_of(context)
        last_inputs, states = context.state_layers[self.layer]
        keys, values = (self.num_key_heads, self.key_dim), (self.num_heads, self.head_dim)
        key_width, width = self.num_key_heads * self.key_dim, self.num_heads * self.head_dim
        inputs, gate, b, a = self.inputs(x, context.low_rank_slots).split(
            [2 * key_width + width, width, self.num_heads, self.num_heads], dim=1
        )
        convolved = self.convolution(inputs, last_inputs, batch)
        query, key, value = convolved.split([key_width, key_width, width], dim=1)
        attended = self.ops.gated_delta_rule(
            query.unflatten(1, keys),
            key.unflatten(1, keys),
            value.unflatten(1, values),
            a,
            b,
            states,
            batch,
            A=self.rates,
            dt_bias=self.dt_bias,
        )
        if rows is not None:
            attended, gate = attended[rows], gate[rows]
        normed = self.ops.rms_norm(attended, self.norm, self.eps).flatten(1)
        gated = self.ops.silu_and_mul(torch.cat([gate, normed], dim=1))
        return self.out(gated, context.low_rank_slots_of(rows))


def _batch_of(context: ForwardContext) -> StateBatch:
    assert context.states is not None, "a step of a model with states has their slots"
    return context.states
