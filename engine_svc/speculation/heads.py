"""Heads that predict a token from the target's hidden state before it and the token there: MTP and EAGLE-3.

They run on every rank as a whole; embeddings and logits that they share with the target are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_svc.model.context import ForwardContext
from engine_svc.model.facts import KVShape
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.model.native.layers import DecoderLayer
from triptych_kernels import Linear


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """How a family's checkpoints name and join the parts of an MTP head.

    prefix: with {} for the number of the target's layers.  is_hidden_first: of what the projection joins.
    keeps_normed: the next prediction reads the hidden state after the last norm.
    """

    prefix: str
    token_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    head: str  # "": the target's
    is_hidden_first: bool
    keeps_normed: bool


# Published by DeepSeek-V3 and GLM-4.5, and by MiMo.
MTP_LAYOUTS = (
    MtpLayout(
        "model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", False, False
    ),
    MtpLayout(
        "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "",
        True, True,
    ),
)  # fmt: skip


@dataclass(slots=True)
class MtpHead:
    """A layer of the target's kind, over its last hidden states and the embeddings of the next tokens."""

    target: NativeDecoder
    layout: MtpLayout
    token_norm: Tensor
    hidden_norm: Tensor
    projection: Linear
    layer: DecoderLayer
    final_norm: Tensor
    head: Linear | None  # None: the target's
    kv_shapes: tuple[KVShape, ...]
    dtype: torch.dtype
    max_position: int
    vocab_size: int
    hidden_size: int
    hidden_layers: tuple[int, ...] = ()
    shared_bytes: int = 0

    def enter(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        hidden: Tensor | None,
        rows: Tensor,
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """See DraftNetwork."""
        assert hidden is not None, "a head reads hidden states"
        target = self.target
        # As in vLLM and in training: the first token of a text has no token before it.
        token_states = target.embed(token_ids).masked_fill_((positions == 0)[:, None], 0.0)
        parts = [target.norm(token_states, self.token_norm), target.norm(hidden, self.hidden_norm)]
        residual = self.projection(torch.cat(parts[::-1] if self.layout.is_hidden_first else parts, dim=-1))
        x = self.layer.enter(residual)
        x, residual = self.layer(x, residual, positions, target.cos_sin, context, rows)
        residual.add_(x)
        normed = target.norm(residual, self.final_norm)
        logits = target.logits(normed) if self.head is None else self.head(normed)
        return logits, normed if self.layout.keeps_normed else residual


@dataclass(slots=True)
class EagleHead:
    """A layer over embeddings and hidden states side by side; the first of these come from several layers.

    Source: EAGLE-3, Li et al. 2025.
    """

    target: NativeDecoder
    embedding: Tensor | None  # [V, hidden]; None: the target's
    joined: Linear  # from the hidden states of several layers
    hidden_norm: Tensor
    layer: DecoderLayer
    final_norm: Tensor
    head: Linear  # over the tokens that the head knows
    token_ids: Tensor | None  # [draft vocabulary] int64, the target's ids of these; None: the same
    cos_sin: Tensor
    kv_shapes: tuple[KVShape, ...]
    dtype: torch.dtype
    max_position: int
    vocab_size: int
    hidden_size: int
    hidden_layers: tuple[int, ...]
    norms_residual: bool = False
    shared_bytes: int = 0

    def enter(self, hidden: Tensor) -> Tensor:
        return self.joined(hidden)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        hidden: Tensor | None,
        rows: Tensor,
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """See DraftNetwork."""
        assert hidden is not None, "a head reads hidden states"
        layer, ops = self.layer, self.layer.ops
        assert layer.input_norm is not None, "the layer is of a Llama"
        token_states = (
            self.target.embed(token_ids) if self.embedding is None else F.embedding(token_ids, self.embedding)
        )
        normed = ops.rms_norm(hidden, self.hidden_norm, layer.eps)
        residual = normed if self.norms_residual else hidden.clone()
        x = torch.cat([ops.rms_norm(token_states, layer.input_norm, layer.eps), normed], dim=-1)
        x, residual = layer(x, residual, positions, self.cos_sin, context, rows)
        residual.add_(x)
        logits = self.head(ops.rms_norm(residual, self.final_norm, layer.eps))
        if self.token_ids is not None:
            known, logits = logits, logits.new_full((len(logits), self.vocab_size), float("-inf"))
            logits.index_copy_(1, self.token_ids, known)
        return logits, residual
