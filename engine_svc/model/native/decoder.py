"""A native decoder: runs a step's tokens through the layers of this rank. Knows no files and no request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Largest
from engine_svc.model.encoders.encoder import ItemEncoder
from engine_svc.model.facts import KVShape, StateShape
from engine_svc.model.loading.packed_weights import Collected
from engine_svc.model.low_rank import (
    Additions,
    EmbeddingAdditions,
    LowRankTargets,
    Pack,
    ProjectionPart,
    make_targets,
    pack_embedding,
)
from engine_svc.model.native.exchange import ExpertExchange, NoExchange
from engine_svc.model.native.layers import (
    DecoderLayer,
    MixtureOfExperts,
    Projection,
    SharedMixture,
    add_and_norm,
)
from engine_svc.model.parallel import Parallel
from engine_svc.model.pooler import Pooler
from triptych_kernels import FusedLayers, Ops


@dataclass(slots=True)
class TokenEmbedding:
    """The rows of the embedding table that this rank holds."""

    weight: Tensor | Callable[[Tensor], Tensor]  # [V / ranks, hidden], or what gives rows of that
    num_rows: int  # V / ranks
    first_token_id: int
    parallel: Parallel
    part: ProjectionPart
    scale: float | None = None  # of rows and of what adapters add to them
    low_rank: EmbeddingAdditions | None = None  # None until adapters are enabled

    def __call__(self, token_ids: Tensor, slots: Tensor | None = None) -> Tensor:
        """token_ids: [T] int64.  slots: [T] int64, see ForwardContext. Returns [T, hidden], new memory."""
        x = self._look_up(token_ids)
        if slots is not None and self.low_rank is not None:
            self.low_rank.add(x, token_ids, slots)
        return x if self.scale is None else x.mul_(self.scale)

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self.parallel.tp_size == 1:
            return self._rows(token_ids)
        indices = token_ids - self.first_token_id
        is_here = (indices >= 0) & (indices < self.num_rows)
        rows = self._rows(indices.clamp_(0, self.num_rows - 1))
        return self.parallel.all_reduce(rows.masked_fill_(~is_here[:, None], 0.0))

    def _rows(self, indices: Tensor) -> Tensor:
        weight = self.weight
        return F.embedding(indices, weight) if isinstance(weight, Tensor) else weight(indices)


@dataclass(slots=True, weakref_slot=True)
class NativeDecoder:
    """The layers of one pipeline stage. The first stage embeds tokens, the last one computes logits."""

    name: str
    ops: Ops
    parallel: Parallel
    embedding: TokenEmbedding | None  # on the first stage
    layers: list[DecoderLayer]
    final_norm: Tensor | None  # on the last stage
    head: Projection | None  # on the last stage, of a model that samples tokens
    # [max_positions, rotary_dim] fp32; or two such tables, of layers without a window and of those with one.
    cos_sin: Tensor
    kv_shapes: tuple[KVShape, ...]
    hidden_size: int
    dtype: torch.dtype
    num_parameters: int
    num_bytes: int  # of this rank's parameters
    state_shapes: tuple[StateShape, ...] = ()  # of layers with recurrences, in order
    input_scale: float | None = None  # by which the first stage multiplies embeddings, whatever their source
    logits_divisor: float | None = None
    is_fusible: bool = False  # it is whole on this rank, so its layers may be one op
    exchange: ExpertExchange = field(default_factory=NoExchange)
    pooler: Pooler | None = None  # of a model that has results besides tokens
    item_encoder: ItemEncoder | None = None  # whose outputs take the place of embeddings of tokens
    packed: Collected | None = None  # its weights by name; None: they are of no single folder, or leave it
    fused: FusedLayers | None = field(init=False, default=None)  # all layers as one op, if the ops have one

    def __post_init__(self) -> None:
        self._fuse()

    @property
    def mixtures(self) -> list[SharedMixture]:
        """The layers' mixtures whose experts are divided over engines, in order."""
        return [layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, SharedMixture)]

    @property
    def expert_choices(self) -> tuple[int, int]:
        """See ModelFacts. Only of a whole model, whose mixtures compute no tokens of other engines."""
        networks = [layer.feed_forward for layer in self.layers]
        chosen = [network.num_chosen for network in networks if isinstance(network, MixtureOfExperts)]
        return (len(chosen), chosen[0]) if chosen and self.parallel.pp_size == 1 else (0, 0)

    @property
    def is_recordable(self) -> bool:
        """Whether decode steps can be recorded: they give logits."""
        return self.head is not None

    @property
    def embedding_size(self) -> int:
        return self.hidden_size

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """Logits [N, V] fp32 of the tokens at `logit_rows`; afterwards the cache holds the step's KV.

        token_ids, positions: [T] int64.  logit_rows: [N] int64, indices in the step. Empty on a stage that is
        not the last, and of a model that only pools.
        """
        x = self._last_hidden(token_ids, positions, logit_rows, context)
        if self.head is None:
            return x.new_empty(0, 0, dtype=torch.float32)
        return self.logits(x, self._head_slots(logit_rows, context))

    def forward_greedy(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        context: ForwardContext,
        kept: Tensor,
    ) -> Largest:
        """Run `forward`, but write only the rows of logits at `kept`, [K] int64, of N."""
        x = self._last_hidden(token_ids, positions, logit_rows, context)
        if self.head is None:
            nothing = x.new_empty(0, dtype=torch.float32)
            return Largest(nothing[:, None], nothing, nothing.long())
        slots = self._head_slots(logit_rows, context)
        if self.parallel.tp_size == 1 and slots is None:
            largest = Largest(*self.ops.greedy_linear(self.head.linear, x, kept))
            if self.logits_divisor is not None:
                largest.kept.div_(self.logits_divisor)
                largest.highest.div_(self.logits_divisor)
            return largest
        logits = self.logits(x, slots)
        return Largest(logits.index_select(0, kept), *self.ops.greedy(logits))

    def embed(self, token_ids: Tensor, slots: Tensor | None = None) -> Tensor:
        """The embeddings [T, hidden] of tokens [T] int64, new memory; on the first stage."""
        assert self.embedding is not None, "the first stage has the embeddings"
        return self.embedding(token_ids, slots)

    def logits(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """Logits [N, V] fp32 of hidden states [N, hidden] after the last norm; on the last stage."""
        assert self.head is not None, "the last stage has the head"
        logits = self.parallel.all_gather(self.head(x, slots))
        return logits if self.logits_divisor is None else logits.div_(self.logits_divisor)

    def _head_slots(self, logit_rows: Tensor, context: ForwardContext) -> Tensor | None:
        """The slots of the tokens at `logit_rows`; None if none of them can add to logits."""
        slots = context.low_rank_slots
        if slots is None or self.head is None or not self.head.adds(slots):
            return None
        return slots[logit_rows]

    def enable_low_rank(self, num_slots: int, max_rank: int) -> LowRankTargets:
        """See LowRankModel. Experts and their routers take no additions."""
        ops, device = self.ops, self.cos_sin.device
        found: list[tuple[Additions, tuple[ProjectionPart, ...], Pack]] = []
        if self.embedding is not None:
            self.embedding.low_rank = EmbeddingAdditions()
            pack = partial(pack_embedding, ops, device)
            found.append((self.embedding.low_rank, (self.embedding.part,), pack))
        projections = [projection for layer in self.layers for projection in layer.projections]
        for projection in (*projections, *([self.head] if self.head is not None else [])):
            widths = [len(range(part.out_features)[part.outputs]) for part in projection.parts]
            (num_inputs,) = {len(range(part.in_features)[part.inputs]) for part in projection.parts}
            projection.low_rank = ops.make_low_rank(
                num_inputs, widths, num_slots, max_rank, self.dtype, device
            )
            found.append((projection.low_rank, projection.parts, ops.pack_low_rank))
        self._fuse()
        return make_targets(found)

    def _fuse(self) -> None:
        dense = [layer.as_dense(self.cos_sin) for layer in self.layers] if self.is_fusible else []
        layers = [layer for layer in dense if layer is not None]
        if layers and len(layers) == len(self.layers) and self.final_norm is not None:
            self.fused = self.ops.fuse_layers(layers, self.final_norm)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: [T, hidden]. As the norms of the layers, with this weight."""
        return self.ops.rms_norm(x, weight, self.layers[0].eps)

    def take_part(self) -> None:
        """Serve other engines' tokens with this engine's experts, in a step without tokens of its own."""
        self.exchange.begin(0, 0)
        nothing = torch.empty(0, self.hidden_size, dtype=self.dtype, device=self.cos_sin.device)
        for mixture in self.mixtures:
            mixture(nothing)

    def _last_hidden(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """[N, hidden], the input of the head. Any stage but the last sends its result to the next one."""
        rows = logit_rows
        readers = [states for states in (context.hidden, context.last) if states and not states.layers]
        if readers:
            rows = torch.arange(token_ids.shape[0], device=token_ids.device)
        self.exchange.begin(token_ids.shape[0], rows.shape[0])
        x = self._run_layers(self._enter(token_ids, context), positions, rows, context)
        if not readers or self.final_norm is None:
            return x
        for states in readers:
            states.tensors.append(x)
        return x[logit_rows]

    def _run_layers(
        self, residual: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """residual: [T, hidden], written. Returns [N, hidden] of the tokens at `logit_rows`."""
        kept = () if context.hidden is None else context.hidden.layers
        if self.fused is not None and not kept:
            layers, slots, attention = context.layers, context.slot_mappings, context.attention
            return self.fused(
                residual, positions, logit_rows, layers, slots, attention, context.low_rank_slots
            )
        x = self.layers[0].enter(residual)
        rows = logit_rows if self.final_norm is not None else None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if context.hidden is not None and index in kept:
                context.hidden.tensors.append(residual.clone())
            x, residual = layer(
                x, residual, positions, self.cos_sin, context, rows if index == last else None
            )
            if index < last:
                following = self.layers[index + 1]
                x = add_and_norm(self.ops, x, residual, following.input_norm, following.eps)
        if self.final_norm is None:
            self.parallel.send(residual.add_(x))
            return residual
        return self.ops.add_rms_norm(x, residual, self.final_norm, self.layers[-1].eps)

    def _enter(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        if self.embedding is not None:
            x = self.embed(token_ids, context.low_rank_slots)
            if context.embedded is not None:
                x.index_copy_(0, context.embedded.positions, context.embedded.rows)
            return x if self.input_scale is None else x.mul_(self.input_scale)
        return self.parallel.receive((token_ids.shape[0], self.hidden_size), self.dtype)
