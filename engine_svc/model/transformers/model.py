"""Any transformers decoder over the paged KV cache, through transformers' own attention interface.

A step's tokens go through the model flattened, as one sequence with explicit positions. The model makes no
masks. Its attention layers call back here: keys and values are written to the cache, and queries read it.
Knows no checkpoint files and no request.
"""

from __future__ import annotations

import inspect
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from engine_svc.model.context import EmbeddedTokens, ForwardContext, HiddenStates
from engine_svc.model.encoders.encoder import ItemEncoder
from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.facts import KVShape, StateShape
from engine_svc.model.low_rank import (
    Additions,
    EmbeddingAdditions,
    LowRankTargets,
    Pack,
    ProjectionPart,
    make_targets,
    pack_embedding,
)
from engine_svc.model.pooler import Pooler
from engine_svc.model.transformers.batch_invariance import make_elementwise_invariant, prepack_calls
from engine_svc.model.transformers.mixers import replace_mixers
from engine_svc.model.transformers.packing import PackedProjection, prepack_experts, prepack_projections
from triptych_kernels import Ops

# Parameters of position embeddings that compute positions from the length of a cache.
_POSITION_OPTIONS = frozenset({"past_key_values_length", "position_ids"})

# The attribute of layers that tune their temperature: after how many positions it changes.
_FLOOR_SCALE = "floor_scale"
_STEEP_FLOOR_SCALE = 4


@dataclass(slots=True)
class AttentionCall:
    """Arguments of an attention layer's call. query: [1, H, T, D], key: [1, G, T, D], value: [1, G, T, E]."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    window: int | None  # as the layer passes it, if it does; the mask is what counts
    sinks: Tensor | None
    soft_cap: float | None
    others: dict[str, object]


Attend = Callable[[AttentionCall], Tensor]
MakeMask = Callable[..., Tensor | None]


class TransformersModel:
    """A transformers decoder whose attention reads and writes the cache of the current step.

    It must have been warmed up (warm_up.py), which rejects models that would run wrongly.
    """

    def __init__(self, module: PreTrainedModel, ops: Ops) -> None:
        self.module = module
        self.name = type(module).__name__
        self.ops = ops
        self.pooler: Pooler | None = None  # of a model that has results besides tokens
        self.item_encoder: ItemEncoder | None = None  # see NativeDecoder
        # Under the first name the model makes no masks. No step uses them, and making one waits for the GPU
        # to see whether the batch contains several sequences.
        self._interface = f"triptych_{uuid.uuid4().hex}"
        self._interface_with_masks = f"{self._interface}_with_masks"
        self._attend: Attend = self._attend_paged
        self._make_mask: MakeMask | None = None
        self._shapes: Sequence[KVShape] = ()
        self._last_position: int | None = None
        self._positions: Tensor | None = None
        self._context: ForwardContext | None = None
        self._logit_rows: Tensor | None = None  # of the step, if the head computes only these
        self._layer = 0
        parameters = inspect.signature(module.forward).parameters
        self._takes_logit_rows = "logits_to_keep" in parameters
        self._takes_embeds = "inputs_embeds" in parameters
        self._register()
        self._takes_positions = "position_ids" in parameters or not self._hand_positions_to_embeddings()
        self._hand_positions_to_temperatures()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.module.device
        return device

    def use_shapes(self, shapes: Sequence[KVShape]) -> None:
        """Per attention layer, in order. What its tokens see is read off these."""
        self._shapes = tuple(shapes)

    def use_state_slots(self) -> tuple[StateShape, ...]:
        """Let the module's layers with states read and write those of the step; returns what each keeps."""
        return replace_mixers(self.module, self.ops, lambda: self._context)

    def use_last_position(self, last_position: int) -> None:
        """Clamp positions to this one.

        A step may be planned before the end of a sequence is known. The model may have no learned embedding
        for the positions of such tokens.
        """
        self._last_position = last_position

    def use_paged_attention(self) -> None:
        """Let the module's attention layers call this object."""
        self.module.set_attn_implementation(self._interface)

    def use_eager_attention(self) -> None:
        """Let the module compute attention itself."""
        self.module.set_attn_implementation("eager")

    def pack_projections(self, token_ids: Tensor) -> None:
        """Lay the module's weights out for its device. token_ids: a sample for the forwards it takes."""
        prepack_projections(self.module, self.ops, lambda: self.logits_alone(token_ids))
        prepack_experts(self.module, self.ops)
        prepack_calls(self.module, self.ops, lambda: self.logits_alone(token_ids))
        # A length that is no multiple of a vector's elements.
        odd_number = token_ids[: len(token_ids) - 1 + len(token_ids) % 2]
        make_elementwise_invariant(self.module, self.ops, lambda: self.logits_alone(odd_number))

    def logits_alone(self, token_ids: Tensor) -> Tensor:
        """[T, V] of one sequence, as the module computes it when it numbers the tokens itself."""
        logits: Tensor = self.module(input_ids=token_ids[None], use_cache=False, return_dict=True).logits[0]
        return logits

    @property
    def embedding_size(self) -> int:
        """The width of an input embedding; 0 where the module takes none in place of a token."""
        weight = getattr(self.module.get_input_embeddings(), "weight", None)
        if not self._takes_embeds or not isinstance(weight, Tensor) or weight.dim() != 2:
            return 0
        return weight.shape[1]

    def check_embeds(self, token_ids: Tensor) -> None:
        """Raise UnsupportedModel where the embeddings of a sequence give other logits than its token ids."""
        same = False
        if self.embedding_size:
            self.use_eager_attention()
            try:
                embeds = self._embed(token_ids)[None]
                output = self.module(inputs_embeds=embeds, use_cache=False, return_dict=True)
                same = torch.equal(output.logits[0], self.logits_alone(token_ids))
            except (TypeError, ValueError, RuntimeError) as error:
                raise UnsupportedModel(f"{self.name} takes no embeddings for tokens: {error}") from error
            finally:
                self.use_paged_attention()
        if not same:
            raise UnsupportedModel(f"{self.name} takes no embeddings in place of tokens")

    def forward_with(self, attend: Attend, make_mask: MakeMask, token_ids: Tensor) -> None:
        """Run one sequence with `attend` in place of paged attention; it returns [1, T, H, E].

        make_mask replaces transformers' own functions that make masks, and gets their arguments.
        """
        self.module.set_attn_implementation(self._interface_with_masks)
        self._attend, self._make_mask = attend, make_mask
        try:
            positions = torch.arange(token_ids.shape[0], device=token_ids.device)
            self._run(token_ids, positions, positions)
        finally:
            self._attend, self._make_mask = self._attend_paged, None
            self.use_paged_attention()

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """Logits [N, V] fp32 of the tokens at `logit_rows`; afterwards the cache holds the step's KV.

        token_ids, positions: [T] int64.  logit_rows: [N] int64, indices in the step.
        """
        self._context, self._logit_rows = context, logit_rows if self._takes_logit_rows else None
        self._layer = 0
        with nullcontext() if context.last is None else self.keeping(context.last):
            logits = self._run(token_ids, positions, logit_rows, context.embedded)
        assert self._layer == len(context.layers)
        self._context = None
        return logits.float()

    @contextmanager
    def keeping(self, states: HiddenStates) -> Iterator[None]:
        """Around a forward: keep what the module computes its logits from, where its decoder returns it."""

        def keep(_: nn.Module, arguments: object, output: object) -> None:
            hidden = getattr(output, "last_hidden_state", None)
            if isinstance(hidden, Tensor):
                states.tensors.append(hidden[0])

        decoder: nn.Module = self.module.get_decoder()  # type: ignore[no-untyped-call]
        handle = decoder.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def enable_low_rank(self, num_slots: int, max_rank: int) -> LowRankTargets:
        """See LowRankModel. Only projections that were packed take additions, and the table of embeddings."""
        ops, head = self.ops, self.module.get_output_embeddings()  # type: ignore[no-untyped-call]
        found: list[tuple[Additions, tuple[ProjectionPart, ...], Pack]] = []
        for name, module in self.module.named_modules():
            if isinstance(module, PackedProjection):
                low_rank = ops.make_low_rank(
                    module.in_features,
                    [module.out_features],
                    num_slots,
                    max_rank,
                    module.weight.dtype,
                    module.weight.device,
                )
                module.add_low_rank(low_rank, self._head_slots if module is head else self._slots)
                part = _whole(name, module.out_features, module.in_features)
                found.append((low_rank, (part,), ops.pack_low_rank))
            elif (
                module is self.module.get_input_embeddings() and type(module).forward is nn.Embedding.forward
            ):
                found.append(self._add_to_embedding(name, module))
        return make_targets(found)

    def _add_to_embedding(
        self, name: str, module: nn.Module
    ) -> tuple[Additions, tuple[ProjectionPart, ...], Pack]:
        additions = EmbeddingAdditions()

        def add(_: nn.Module, arguments: tuple[Tensor, ...], found: Tensor) -> Tensor:
            slots = self._slots()
            if slots is None:
                return found
            rows = found.flatten(0, -2)
            additions.add(rows, arguments[0].flatten(), slots)
            return rows.view_as(found)

        module.register_forward_hook(add)
        weight = module.get_parameter("weight")
        num_tokens, hidden = weight.shape
        pack = partial(pack_embedding, self.ops, weight.device)
        return additions, (_whole(name, hidden, num_tokens),), pack

    def _slots(self) -> Tensor | None:
        return None if self._context is None else self._context.low_rank_slots

    def _head_slots(self) -> Tensor | None:
        return None if self._context is None else self._context.low_rank_slots_of(self._logit_rows)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T, hidden], the input of the module's first layer."""
        embeds: Tensor = self.module.get_input_embeddings()(token_ids)
        return embeds

    def _register(self) -> None:
        # Some models drop keyword arguments on the way to their layers, so the step comes from this object.
        # The registration is never removed, so it must not keep the model's weights alive.
        owner = weakref.ref(self)

        def model() -> TransformersModel:
            owned = owner()
            assert owned is not None, "the model of a running module still exists"
            return owned

        def attend(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            scaling: float | None = None,
            sliding_window: int | None = None,
            s_aux: Tensor | None = None,
            softcap: float | None = None,
            **others: object,
        ) -> tuple[Tensor, None]:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            call = AttentionCall(
                module, query, key, value, attention_mask, scale, sliding_window, s_aux, softcap, others
            )
            return model()._attend(call), None

        def make_mask(**arguments: object) -> Tensor | None:
            make = model()._make_mask
            assert make is not None, "no mask is made in a step"
            return make(**arguments)

        AttentionInterface.register(self._interface, attend)
        AttentionInterface.register(self._interface_with_masks, attend)
        AttentionMaskInterface.register(self._interface_with_masks, make_mask)

    def _hand_positions_to_embeddings(self) -> bool:
        """Set the positions of models that number tokens by the length of a cache. False if this is none."""

        def replace(
            _: nn.Module, arguments: tuple[object, ...], options: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            if self._positions is None:
                return arguments, options
            return arguments, {**options, "position_ids": self._positions}

        embeddings = [
            module
            for module in self.module.modules()
            if inspect.signature(module.forward).parameters.keys() >= _POSITION_OPTIONS
        ]
        for embedding in embeddings:
            embedding.register_forward_pre_hook(replace, with_kwargs=True)
        return bool(embeddings)

    def _hand_positions_to_temperatures(self) -> None:
        """Set the positions of layers that tune their temperature by counting from the length of a cache."""

        def replace(
            _: nn.Module, arguments: tuple[object, ...], options: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            if self._positions is None:
                return arguments, options
            return arguments, {**options, "past_key_values": _Places(self._positions)}

        for module in self.module.modules():
            if getattr(module, "attn_temperature_tuning", False):
                module.register_forward_pre_hook(replace, with_kwargs=True)

    @contextmanager
    def steep_temperatures(self) -> Iterator[None]:
        """Inside the block temperatures that stay the same for thousands of positions change every few.

        So a sample shows whether they follow a token's position.
        """
        kept = [
            (module, getattr(module, _FLOOR_SCALE))
            for module in self.module.modules()
            if hasattr(module, _FLOOR_SCALE)
        ]
        for module, _ in kept:
            setattr(module, _FLOOR_SCALE, _STEEP_FLOOR_SCALE)
        try:
            yield
        finally:
            for module, floor_scale in kept:
                setattr(module, _FLOOR_SCALE, floor_scale)

    def _run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embedded: EmbeddedTokens | None = None,
    ) -> Tensor:
        options: dict[str, Tensor] = {"logits_to_keep": logit_rows} if self._takes_logit_rows else {}
        if embedded is None:
            options["input_ids"] = token_ids[None]
        else:
            embeds = self._embed(token_ids)
            options["inputs_embeds"] = embeds.index_copy(0, embedded.positions, embedded.rows)[None]
        if self._last_position is not None:
            positions = positions.clamp(max=self._last_position)
        if self._takes_positions:
            options["position_ids"] = positions[None]
        self._positions = positions
        try:
            output = self.module(use_cache=False, return_dict=True, **options)
        finally:
            self._positions = None
        logits: Tensor = output.logits[0]
        return logits if self._takes_logit_rows else logits[logit_rows]

    def _attend_paged(self, call: AttentionCall) -> Tensor:
        context, index = self._context, self._layer
        assert context is not None
        if call.mask is not None:
            raise UnsupportedModel(f"{self.name} adds a mask of its own to attention")
        self._layer = index + 1
        layer, shape = context.layers[index], self._shapes[index]
        batch, dtype = context.attention[layer.group], layer.key_cache.dtype
        self.ops.kv_write(
            call.key[0].transpose(0, 1).to(dtype),
            call.value[0].transpose(0, 1).to(dtype),
            layer.key_cache,
            layer.value_cache,
            context.slot_mappings[layer.group],
        )
        attended: Tensor = self.ops.paged_attention(
            call.query[0].transpose(0, 1).to(dtype),
            layer.key_cache,
            layer.value_cache,
            batch if shape.chunk is None else batch.in_local_chunks(shape.chunk),
            scale=call.scale,
            window=shape.window,
            sinks=call.sinks,
            soft_cap=call.soft_cap,
        )
        # Some models view the result in another shape, which requires contiguous memory.
        return attended[None].to(call.value.dtype).contiguous()


class _Places:
    """In place of a cache, for a layer that numbers a step's tokens from the cache's length on."""

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, _layer: int = 0) -> Tensor:
        """What has to be added to a token's index in the step."""
        return self._positions - torch.arange(self._positions.shape[0], device=self._positions.device)

    def update(self, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return key, value


def _whole(name: str, out_features: int, in_features: int) -> ProjectionPart:
    return ProjectionPart(name, out_features, in_features, slice(None), slice(None))
