"""The parts of a native decoder layer. `parallel` combines the ranks' shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine_svc.model.context import ForwardContext
from engine_svc.model.native.exchange import ExpertExchange
from engine_svc.model.parallel import Parallel
from triptych_kernels import DenseLayer, Experts, Linear, Ops


class FeedForward(Protocol):
    """The network after attention in a layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden], this rank's share of it."""


@dataclass(slots=True)
class Attention:
    """Queries, keys and values in one projection; attention over the cache; the projection back."""

    ops: Ops
    layer: int  # index among this rank's attention layers
    qkv: Linear
    out: Linear
    num_heads: int  # on this rank, as num_kv_heads
    num_kv_heads: int
    head_dim: int
    scale: float  # of a query's product with a key
    window: int | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float

    def __call__(
        self, x: Tensor, positions: Tensor, cos_sin: Tensor, context: ForwardContext, rows: Tensor | None
    ) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden], this rank's share; if `rows` are given, only of these."""
        return self.attend(
            self.qkv(x), positions, cos_sin, context, rows, query_norm=self.query_norm, key_norm=self.key_norm
        )

    def attend(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        context: ForwardContext,
        rows: Tensor | None,
        *,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
    ) -> Tensor:
        """Attend with projected tokens: qkv is [T, (heads + 2 kv heads) * head_dim], written."""
        cache = context.layers[self.layer]
        self.ops.rotary_kv_write(
            qkv,
            positions,
            cos_sin,
            context.slot_mappings[cache.group],
            cache.key_cache,
            cache.value_cache,
            num_heads=self.num_heads,
            query_norm=query_norm,
            key_norm=key_norm,
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
        ).reshape(num_tokens, num_heads * head_dim)
        return self.out(attended if rows is None else attended[rows])


@dataclass(slots=True)
class GatedFeedForward:
    """down(silu(gate(x)) * up(x)), with gate and up in one projection."""

    gate_up: Linear  # with silu(gate) * up as its result
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden], this rank's share of it."""
        return self.down(self.gate_up(x))


@dataclass(slots=True)
class MixtureOfExperts:
    """A router that chooses experts for each token, and their weighted sum. Every rank routes every token."""

    router: Linear
    experts: Experts
    num_chosen: int
    normalizes: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden], the part of this rank's experts."""
        scores = torch.softmax(self.router(x).float(), dim=-1)
        weights, expert_ids = torch.topk(scores, self.num_chosen, dim=-1)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(x, expert_ids, weights)


@dataclass(slots=True)
class SharedMixture:
    """A mixture whose experts are divided over engines, each of which has tokens of its own."""

    mixture: MixtureOfExperts
    exchange: ExpertExchange
    is_last_layer: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Returns [T, hidden]; also serves the tokens of the other engines."""
        tokens = self.exchange.gather(x, is_last_layer=self.is_last_layer)
        if not tokens.shape[0]:
            # All engines skip the exchange in this case, so none waits.
            return x
        return self.exchange.add_up(self.mixture(tokens), is_last_layer=self.is_last_layer)


@dataclass(slots=True)
class DecoderLayer:
    """Attention and a feed-forward network, each preceded by a norm that also adds the residual."""

    ops: Ops
    parallel: Parallel
    input_norm: Tensor
    attention: Attention
    post_attention_norm: Tensor
    feed_forward: FeedForward
    eps: float

    def as_dense(self) -> DenseLayer | None:
        """The weights of this layer for ops that compute whole layers; None if it has experts."""
        attention, network = self.attention, self.feed_forward
        if not isinstance(network, GatedFeedForward):
            return None
        return DenseLayer(
            input_norm=self.input_norm,
            qkv=attention.qkv,
            query_norm=attention.query_norm,
            key_norm=attention.key_norm,
            out=attention.out,
            post_attention_norm=self.post_attention_norm,
            gate_up=network.gate_up,
            down=network.down,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            window=attention.window,
            eps=self.eps,
        )

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        context: ForwardContext,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """x: [T, hidden], normed. residual: [T, hidden], written. Returns the summand and the residual.

        If `rows` are given, only these tokens' results are computed: the others' are not used.
        """
        attended = self.parallel.all_reduce(self.attention(x, positions, cos_sin, context, rows))
        if rows is not None:
            residual = residual[rows]
        x = self.ops.add_rms_norm(attended, residual, self.post_attention_norm, self.eps)
        return self.parallel.all_reduce(self.feed_forward(x)), residual
