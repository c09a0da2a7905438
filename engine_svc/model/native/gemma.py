"""The native decoder of Gemma 3: norms on both sides of each part, two rotary tables, gelu by tanh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_svc.model.context import ForwardContext
from engine_svc.model.elementwise import in_whole_vectors
from engine_svc.model.native.build import DecoderBuilder
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.model.native.layers import Attention, DecoderLayer, FeedForward, Projection
from triptych_kernels import DenseLayer, Ops


def norm(ops: Ops, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm in fp32, rounded to x's dtype. weight: fp32, the stored weight plus 1, exact."""
    return ops.rms_norm(x.float().contiguous(), weight, eps).to(x.dtype)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _even_gelu(x: Tensor) -> Tensor:
    return in_whole_vectors(_gelu, x)


class GemmaAttention(Attention):
    """Attention whose queries and keys are normed head by head before they are rotated."""

    def __call__(
        self, x: Tensor, positions: Tensor, cos_sin: Tensor, context: ForwardContext, rows: Tensor | None
    ) -> Tensor:
        """Compute attention; arguments are those of `Attention`."""
        qkv = self.qkv(x, context.low_rank_slots)
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        heads = qkv.view(x.shape[0], num_heads + 2 * num_kv_heads, self.head_dim)
        for part, weight in (
            (heads[:, :num_heads], self.query_norm),
            (heads[:, num_heads : num_heads + num_kv_heads], self.key_norm),
        ):
            if weight is not None:
                part.copy_(norm(self.ops, part, weight, self.eps))
        return self.attend(qkv, positions, cos_sin, context, rows)


@dataclass(slots=True)
class GeluFeedForward:
    """down(gelu(gate(x)) * up(x)), with gate and up in one projection."""

    gate_up: Projection
    down: Projection
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, slots: Tensor | None, expert_choices: list[Tensor] | None = None) -> Tensor:
        """x: [T, hidden].  slots: [T]. Returns [T, hidden], this rank's share of it."""
        gate, up = self.gate_up(x, slots).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up, slots)

    @property
    def projections(self) -> Sequence[Projection]:
        return self.gate_up, self.down


@dataclass(slots=True)
class GemmaLayer(DecoderLayer):
    """A layer that norms what attention and the feed-forward network add to the residual."""

    pre_feed_forward_norm: Tensor
    post_feed_forward_norm: Tensor

    def as_dense(self) -> DenseLayer | None:
        return None

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        context: ForwardContext,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer; arguments are those of `DecoderLayer`.

        cos_sin: [2, positions, head_dim], without a window and with one.
        """
        table = cos_sin[0 if self.attention.window is None else 1]
        attended = self.parallel.all_reduce(self.attention(x, positions, table, context, rows))
        if rows is not None:
            residual = residual[rows]
        residual.add_(norm(self.ops, attended, self.post_attention_norm, self.eps))
        x = norm(self.ops, residual, self.pre_feed_forward_norm, self.eps)
        added = self.parallel.all_reduce(self.feed_forward(x, context.low_rank_slots_of(rows)))
        return norm(self.ops, added, self.post_feed_forward_norm, self.eps), residual


class GemmaDecoder(NativeDecoder):
    """Norms with fp32 weights around layers, and embeddings times the square root of their size."""

    def _run_layers(
        self, residual: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        kept = () if context.hidden is None else context.hidden.layers
        rows = logit_rows if self.final_norm is not None else None
        last = self.layers[-1]
        for index, layer in enumerate(self.layers):
            if context.hidden is not None and index in kept:
                context.hidden.tensors.append(residual.clone())
            x = norm(self.ops, residual, layer.input_norm, layer.eps)
            kept_rows = rows if layer is last else None
            x, residual = layer(x, residual, positions, self.cos_sin, context, kept_rows)
            residual.add_(x)
        if self.final_norm is None:
            self.parallel.send(residual)
            return residual
        return norm(self.ops, residual, self.final_norm, last.eps)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(self.ops, x, weight, self.layers[0].eps)

    def embed(self, token_ids: Tensor, slots: Tensor | None = None) -> Tensor:
        return super().embed(token_ids, slots).mul_(self._embedding_scale)

    @cached_property
    def _embedding_scale(self) -> float:
        # As in transformers, rounded to the dtype of the weights.
        return torch.tensor(self.hidden_size**0.5, dtype=self.dtype).item()


class GemmaBuilder(DecoderBuilder):
    """Builds a GemmaDecoder: every vector of such a checkpoint is the weight of a norm, less 1."""

    decoder_type = GemmaDecoder
    attention_type = GemmaAttention

    def vector(self, name: str, size: int) -> Tensor:
        weight = super().vector(name, size)
        self.num_bytes += size * torch.float32.itemsize - weight.nbytes
        return weight.float() + 1.0

    def layer(self, prefix: str, index: int, local_index: int) -> GemmaLayer:
        hidden = self.spec.hidden_size
        return GemmaLayer(
            ops=self.ops,
            parallel=self.parallel,
            input_norm=self.vector(prefix + "input_layernorm.weight", hidden),
            attention=self._attention(prefix + "self_attn.", index, local_index),
            post_attention_norm=self.vector(prefix + "post_attention_layernorm.weight", hidden),
            feed_forward=self._dense(prefix + "mlp."),
            eps=self.spec.eps,
            pre_feed_forward_norm=self.vector(prefix + "pre_feedforward_layernorm.weight", hidden),
            post_feed_forward_norm=self.vector(prefix + "post_feedforward_layernorm.weight", hidden),
        )

    def _feed_forward(self, gate_up: list[tuple[str, int, int, int]], down: Projection) -> FeedForward:
        activation = _even_gelu if self.ops.is_batch_invariant else _gelu
        return GeluFeedForward(
            self._rows_linear(gate_up, self.spec.hidden_size, False, self.ops.pack_linear), down, activation
        )
