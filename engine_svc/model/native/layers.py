"""The parts of a native decoder layer. `parallel` combines the ranks' shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from engine_svc.model.context import ForwardContext
from engine_svc.model.low_rank import ProjectionPart
from engine_svc.model.native.exchange import ExpertExchange
from engine_svc.model.parallel import Parallel
from triptych_kernels import DenseLayer, Experts, LayerLowRank, Linear, LowRank, Ops


class Mixer(Protocol):
    """The part of a layer in which a token reads tokens before it: attention, or a recurrence."""

    def __call__(
        self, x: Tensor, positions: Tensor, cos_sin: Tensor, context: ForwardContext, rows: Tensor | None
    ) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden], this rank's share; if `rows` are given, only of these."""

    @property
    def projections(self) -> Sequence[Projection]:
        """Those that adapters may add to."""


class FeedForward(Protocol):
    """The network after the mixer in a layer."""

    def __call__(self, x: Tensor, slots: Tensor | None, expert_choices: list[Tensor] | None = None) -> Tensor:
        """x: [T, hidden].  slots: [T]. Returns [T, hidden], this rank's share of it.

        slots, expert_choices: see ForwardContext.
        """

    @property
    def projections(self) -> Sequence[Projection]:
        """Those that adapters may add to."""


@dataclass(slots=True)
class Projection:
    """A linear op, of a weight of the checkpoint or of several side by side, and what adapters add to it."""

    linear: Linear
    parts: tuple[ProjectionPart, ...]
    low_rank: LowRank | None = None  # None until adapters are enabled

    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """x: [T, inputs].  slots: [T] int64, see ForwardContext. Returns [T, outputs]."""
        if slots is None or self.low_rank is None or self.low_rank.is_empty:
            return self.linear(x)
        return self.linear(x, self.low_rank(x, slots))

    def adds(self, slots: Tensor | None) -> bool:
        """Whether any token may get additions."""
        return slots is not None and self.low_rank is not None and not self.low_rank.is_empty


@dataclass(slots=True)
class Attention:
    """Queries, keys and values in one projection; attention over the cache; the projection back."""

    ops: Ops
    parallel: Parallel
    layer: int  # index among this rank's attention layers
    qkv: Projection
    out: Projection
    num_heads: int  # on this rank, as num_kv_heads
    num_kv_heads: int
    head_dim: int
    scale: float  # of a query's product with a key
    window: int | None
    query_norm: Tensor | None  # [head_dim]; if norms span heads, of the heads of all ranks
    key_norm: Tensor | None
    norms_span_heads: bool
    has_gates: bool  # the projection has each head's query with a gate behind it, of what the head attends to
    sinks: Tensor | None  # [num_heads] fp32, see the op
    eps: float

    @property
    def projections(self) -> Sequence[Projection]:
        return self.qkv, self.out

    def __call__(
        self, x: Tensor, positions: Tensor, cos_sin: Tensor, context: ForwardContext, rows: Tensor | None
    ) -> Tensor:
        qkv, gates = self.qkv(x, context.low_rank_slots), None
        if self.has_gates:
            qkv, gates = self._without_gates(qkv)
        if self.norms_span_heads:
            self._norm_together(qkv)
        cache = context.layers[self.layer]
        self.ops.rotary_kv_write(
            qkv,
            positions,
            self.rotary_table(cos_sin),
            context.slot_mappings[cache.group],
            cache.key_cache,
            cache.value_cache,
            num_heads=self.num_heads,
            query_norm=None if self.norms_span_heads else self.query_norm,
            key_norm=None if self.norms_span_heads else self.key_norm,
            eps=self.eps,
        )
        num_tokens, num_heads, head_dim = qkv.shape[0], self.num_heads, self.head_dim
        heads = qkv.view(num_tokens, num_heads + 2 * self.num_kv_heads, head_dim)
        attended = self.ops.paged_attention(
            heads[:, :num_heads],
            cache.key_cache,
            cache.value_cache,
            context.attention[cache.group],
            scale=self.scale,
            window=self.window,
            sinks=self.sinks,
        ).reshape(num_tokens, num_heads * head_dim)
        if rows is not None:
            attended, gates = attended[rows], None if gates is None else gates[rows]
        if gates is not None:
            attended = self.ops.sigmoid_and_mul(torch.cat([gates, attended], dim=1))
        return self.out(attended, context.low_rank_slots_of(rows))

    def _without_gates(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values, [T, (H + 2 G) D], and gates, [T, H D].  projected: [T, (2 H + 2 G) D]."""
        width = 2 * self.num_heads * self.head_dim
        pairs = projected[:, :width].unflatten(1, (self.num_heads, 2, self.head_dim))
        queries, gates = pairs.unbind(2)
        return torch.cat([queries.flatten(1), projected[:, width:]], dim=1), gates.flatten(1)

    def _norm_together(self, qkv: Tensor) -> None:
        """Norm the queries of all ranks' heads, and the keys.  qkv: [T, (H + 2 G) D], written."""
        first = 0
        for norm, num_heads in ((self.query_norm, self.num_heads), (self.key_norm, self.num_kv_heads)):
            assert norm is not None, "norms that span heads are there"
            width = num_heads * self.head_dim
            part = qkv[:, first : first + width]
            normed = self.ops.rms_norm(self.parallel.all_gather(part), norm, self.eps)
            own = self.parallel.tp_rank * width
            part.copy_(normed[:, own : own + width])
            first += width

    def rotary_table(self, cos_sin: Tensor) -> Tensor:
        """This layer's of a decoder's tables, [max_positions, head_dim].  cos_sin: see NativeDecoder."""
        return cos_sin if cos_sin.dim() == 2 else cos_sin[0 if self.window is None else 1]


@dataclass(slots=True)
class GatedFeedForward:
    """down(activation(gate(x)) * up(x)), with gate and up in one projection."""

    gate_up: Projection  # with activation(gate) * up as its result
    down: Projection

    def __call__(self, x: Tensor, slots: Tensor | None, expert_choices: list[Tensor] | None = None) -> Tensor:
        """x: [T, hidden].  slots: [T]. Returns [T, hidden], this rank's share of it."""
        return self.down(self.gate_up(x, slots), slots)

    @property
    def projections(self) -> Sequence[Projection]:
        return self.gate_up, self.down


@dataclass(slots=True)
class MixtureOfExperts:
    """A router that chooses experts for each token, and their weighted sum. Every rank routes every token.

    Adapters add nothing to it.
    """

    router: Linear
    experts: Experts
    num_chosen: int
    normalizes: bool
    projections: ClassVar[Sequence[Projection]] = ()

    def __call__(
        self, x: Tensor, slots: Tensor | None = None, expert_choices: list[Tensor] | None = None
    ) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden], the part of this rank's experts."""
        scores = torch.softmax(self.router(x).float(), dim=-1)
        weights, expert_ids = torch.topk(scores, self.num_chosen, dim=-1)
        if expert_choices is not None:
            expert_choices.append(expert_ids)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(x, expert_ids, weights)


@dataclass(slots=True)
class SharedMixture:
    """A mixture whose experts are divided over engines, each of which has tokens of its own."""

    mixture: MixtureOfExperts
    exchange: ExpertExchange
    is_last_layer: bool
    projections: ClassVar[Sequence[Projection]] = ()

    def __call__(
        self, x: Tensor, slots: Tensor | None = None, expert_choices: list[Tensor] | None = None
    ) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden]; also serves the tokens of the other engines."""
        tokens = self.exchange.gather(x, is_last_layer=self.is_last_layer)
        if not tokens.shape[0]:
            # All engines skip the exchange in this case, so none waits.
            return x
        return self.exchange.add_up(self.mixture(tokens), is_last_layer=self.is_last_layer)


@dataclass(slots=True)
class SharedExpert:
    """A network that every token passes, beside the experts that it chooses."""

    ops: Ops
    network: FeedForward
    gate: Linear | None  # of one output: what the network gives is multiplied by its sigmoid

    def __call__(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """x: [T, hidden].  slots: [T]. Returns [T, hidden], this rank's share of it."""
        added = self.network(x, slots)
        if self.gate is None:
            return added
        opened = self.gate(x)
        return added.mul_(self.ops.sigmoid_and_mul(torch.cat([opened, torch.ones_like(opened)], dim=1)))


@dataclass(slots=True)
class DecoderLayer:
    """A mixer and a feed-forward network, with norms of what each reads or of what it adds, or of both."""

    ops: Ops
    parallel: Parallel
    mixer: Mixer
    feed_forward: FeedForward
    eps: float
    input_norm: Tensor | None = None
    post_attention_norm: Tensor | None = None  # of the residual, before the feed-forward network
    attention_out_norm: Tensor | None = None  # of what the mixer adds to the residual
    feed_forward_out_norm: Tensor | None = None
    residual_scale: float | None = None  # of what is added to the residual, normed or not
    shared_expert: SharedExpert | None = None  # adds to what the feed-forward network gives

    def as_dense(self, cos_sin: Tensor) -> DenseLayer | None:
        """The weights of this layer for ops that compute whole layers; None if it has parts that they lack.

        cos_sin: see NativeDecoder.
        """
        attention, network = self.mixer, self.feed_forward
        if not isinstance(attention, Attention) or not isinstance(network, GatedFeedForward):
            return None
        if attention.sinks is not None or attention.has_gates:
            return None
        return DenseLayer(
            input_norm=self.input_norm,
            qkv=attention.qkv.linear,
            query_norm=attention.query_norm,
            key_norm=attention.key_norm,
            out=attention.out.linear,
            post_attention_norm=self.post_attention_norm,
            gate_up=network.gate_up.linear,
            down=network.down.linear,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            scale=attention.scale,
            window=attention.window,
            cos_sin=attention.rotary_table(cos_sin),
            eps=self.eps,
            attention_out_norm=self.attention_out_norm,
            feed_forward_out_norm=self.feed_forward_out_norm,
            residual_scale=self.residual_scale,
            low_rank=LayerLowRank(
                attention.qkv.low_rank,
                attention.out.low_rank,
                network.gate_up.low_rank,
                network.down.low_rank,
            ),
        )

    @property
    def projections(self) -> list[Projection]:
        """Those that adapters may add to, in the order in which a forward runs them."""
        shared = () if self.shared_expert is None else self.shared_expert.network.projections
        return [*self.mixer.projections, *self.feed_forward.projections, *shared]

    def enter(self, residual: Tensor) -> Tensor:
        """What the mixer reads of the residual, [T, hidden], or the residual itself."""
        norm = self.input_norm
        return residual if norm is None else self.ops.rms_norm(residual, norm, self.eps)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        context: ForwardContext,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """x: [T, hidden], see `enter`. residual: [T, hidden], written. Returns the summand and the residual.

        If `rows` are given, only these tokens' results are computed: the others' are not used.
        """
        mixed = self.parallel.all_reduce(self.mixer(x, positions, cos_sin, context, rows))
        if rows is not None:
            residual = residual[rows]
        summand = self._summand(mixed, self.attention_out_norm)
        x = add_and_norm(self.ops, summand, residual, self.post_attention_norm, self.eps)
        slots = context.low_rank_slots_of(rows)
        added = self.feed_forward(x, slots, context.expert_choices)
        if self.shared_expert is not None:
            added = added.add_(self.shared_expert(x, slots))
        return self._summand(self.parallel.all_reduce(added), self.feed_forward_out_norm), residual

    def _summand(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """What is added to the residual.  x: [T, hidden], may be written."""
        if norm is not None:
            x = self.ops.rms_norm(x, norm, self.eps)
        return x if self.residual_scale is None else x.mul_(self.residual_scale)


def add_and_norm(ops: Ops, summand: Tensor, residual: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """residual += summand, in place. Returns its norm, or where there is none the residual.

    summand, residual: [T, hidden].
    """
    if norm is None:
        return residual.add_(summand)
    return ops.add_rms_norm(summand, residual, norm, eps)
