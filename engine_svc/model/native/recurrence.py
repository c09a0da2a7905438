"""Mixers of a native decoder layer that keep a state for each row, in place of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_svc.model.context import ForwardContext
from engine_svc.model.facts import StateShape
from engine_svc.model.native.layers import Projection
from engine_svc.model.parallel import Parallel
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
class Recurrence(ABC):
    """What follows tokens by a state: projections before and behind it, a convolution between."""

    ops: Ops
    layer: int  # index among this rank's layers with states
    inputs: Projection
    convolution: Convolution
    out: Projection

    @property
    @abstractmethod
    def state_shape(self) -> StateShape: ...

    @property
    def projections(self) -> Sequence[Projection]:
        return self.inputs, self.out

    def __call__(
        self, x: Tensor, positions: Tensor, cos_sin: Tensor, context: ForwardContext, rows: Tensor | None
    ) -> Tensor:
        assert context.states is not None, "a step of a model with states has their slots"
        states = context.state_layers[self.layer]
        mixed = self._mixed(self.inputs(x, context.low_rank_slots), states, context.states, rows)
        return self.out(mixed, context.low_rank_slots_of(rows))

    @abstractmethod
    def _mixed(self, x: Tensor, states: tuple[Tensor, ...], batch: StateBatch, rows: Tensor | None) -> Tensor:
        """What `out` projects, of these rows.  x: of `inputs`, all tokens.  states: of all slots, written."""


@dataclass(slots=True)
class DeltaRule(Recurrence):
    """Linear attention by the gated delta rule; its heads are normed and gated.

    inputs: queries, keys and values; gates; b; a.
    """

    num_groups: int  # key heads on this rank, as num_heads
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

    def _mixed(self, x: Tensor, states: tuple[Tensor, ...], batch: StateBatch, rows: Tensor | None) -> Tensor:
        last_inputs, heads = states
        keys, values = (self.num_groups, self.key_dim), (self.num_heads, self.head_dim)
        key_width, width = self.num_groups * self.key_dim, self.num_heads * self.head_dim
        inputs, gate, b, a = x.split([2 * key_width + width, width, self.num_heads, self.num_heads], dim=1)
        convolved = self.convolution(inputs, last_inputs, batch)
        query, key, value = convolved.split([key_width, key_width, width], dim=1)
        attended = self.ops.gated_delta_rule(
            query.unflatten(1, keys),
            key.unflatten(1, keys),
            value.unflatten(1, values),
            a,
            b,
            heads,
            batch,
            A=self.rates,
            dt_bias=self.dt_bias,
        )
        if rows is not None:
            attended, gate = attended[rows], gate[rows]
        normed = self.ops.rms_norm(attended, self.norm, self.eps).flatten(1)
        return self.ops.silu_and_mul(torch.cat([gate, normed], dim=1))


@dataclass(slots=True)
class StateScan(Recurrence):
    """The state space recurrence of Mamba-2; its heads are gated and normed, group by group.

    inputs: gates; x, B and C; dt.
    """

    parallel: Parallel
    num_groups: int  # on this rank, as num_heads
    state_size: int
    num_heads: int
    head_dim: int
    rates: Tensor  # A of the op, as D, dt_bias and dt_limit
    skips: Tensor
    dt_bias: Tensor
    dt_limit: tuple[float, float]
    norm: Tensor  # [num_heads * head_dim]
    unit: Tensor  # fp32 ones, one for each value of a group: groups are normed before they are weighed
    norm_spans_ranks: bool  # a group's heads are on several
    eps: float

    @property
    def state_shape(self) -> StateShape:
        return StateShape((self.convolution.state_shape, (self.num_heads, self.state_size, self.head_dim)))

    def _mixed(self, x: Tensor, states: tuple[Tensor, ...], batch: StateBatch, rows: Tensor | None) -> Tensor:
        last_inputs, kept = states
        width, group_width = self.num_heads * self.head_dim, self.num_groups * self.state_size
        groups = (self.num_groups, self.state_size)
        gate, inputs, dt = x.split([width, width + 2 * group_width, self.num_heads], dim=1)
        convolved = self.convolution(inputs, last_inputs, batch)
        heads, B, C = convolved.split([width, group_width, group_width], dim=1)
        y = self.ops.ssd_scan(
            heads.unflatten(1, (self.num_heads, self.head_dim)),
            dt,
            B.unflatten(1, groups),
            C.unflatten(1, groups),
            kept,
            batch,
            A=self.rates,
            D=self.skips,
            dt_bias=self.dt_bias,
            dt_limit=self.dt_limit,
        ).flatten(1)
        if rows is not None:
            y, gate = y[rows], gate[rows]
        # As in transformers, rounded once, behind the norm.
        return self._normed(self.ops.silu_and_mul(torch.cat([gate.float(), y], dim=1))).to(x.dtype)

    def _normed(self, x: Tensor) -> Tensor:
        """x: [T, num_heads * head_dim] fp32. Returns the same shape."""
        width = x.shape[1]
        if self.norm_spans_ranks:
            x = self.parallel.all_gather(x)
        normed = self.ops.rms_norm(x.reshape(-1, len(self.unit)), self.unit, self.eps).view(x.shape)
        if self.norm_spans_ranks:
            own = self.parallel.tp_rank * width
            normed = normed[:, own : own + width]
        return normed * self.norm
