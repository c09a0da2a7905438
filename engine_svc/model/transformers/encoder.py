"""Encoders of transformers (BERT, RoBERTa, XLM-R, DistilBERT): one bidirectional forward, without a cache.

A step's prompts go through the layers flattened, without padding; attention runs over groups of prompts of
equal length.
"""

from __future__ import annotations

import uuid
import weakref
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AttentionInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from engine_svc.core.pooling_spec import PoolingSpec
from engine_svc.model.context import ForwardContext
from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.facts import KVShape
from engine_svc.model.pooler import Head, Pooler, make_pooler
from engine_svc.model.transformers.encoder_layers import fuse_layers
from engine_svc.model.transformers.packing import prepack_projections
from triptych_kernels import AttentionBatch, Ops

_CLASSES = {
    "embed": MODEL_MAPPING,
    "classify": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "token_classify": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}
# These number their positions from the one after the padding token's.
_POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta")


def encoder_class(config: PreTrainedConfig, head: str) -> type[PreTrainedModel]:
    """The transformers class with this head. Raises UnsupportedModel."""
    chosen = _CLASSES[head].get(type(config), None)
    if not isinstance(chosen, type) or getattr(config, "is_decoder", False):
        raise UnsupportedModel(f"{type(config).__name__} has no encoder with the head {head}")
    return chosen


def first_position(config: PreTrainedConfig) -> int:
    """The position of a prompt's first token in the table of position embeddings."""
    if config.model_type not in _POSITIONS_AFTER_PADDING:
        return 0
    return int(config.pad_token_id or 0) + 1


@dataclass(frozen=True, slots=True)
class _Group:
    """Prompts of one length that follow each other in a step's tokens."""

    start: int
    num_prompts: int
    length: int


class EncoderModel:
    """An encoder whose step computes whole prompts."""

    kv_shapes: tuple[KVShape, ...] = ()
    embedding_size = 0

    def __init__(self, module: PreTrainedModel, pooler: Pooler) -> None:
        self.module = module
        self.pooler = pooler
        self._base: nn.Module = module.base_model
        self._first_position = first_position(module.config)
        self._takes_types = getattr(module.config, "type_vocab_size", 0) > 1
        self._groups: list[_Group] = []
        self._interface = f"triptych_encoder_{uuid.uuid4().hex}"
        self._register()
        # Under a name that transformers knows no masks for, the model makes none.
        module.set_attn_implementation(self._interface)

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """Write `context.last`; there are no logits: [0, 0]."""
        lengths = context.attention[0].query_lengths.tolist()
        # Stable, so that prompts of equal length stay in order.
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        is_sorted = order == list(range(len(lengths)))
        back: Tensor | None = None
        types = context.token_types
        if not is_sorted:
            parts = torch.arange(token_ids.shape[0], device=token_ids.device).split(lengths)
            index = torch.cat([parts[row] for row in order])
            back = torch.empty_like(index)
            back[index] = torch.arange(len(index), device=index.device)
            token_ids, positions = token_ids[index], positions[index]
            types = types if types is None else types[index]
        self._groups = _groups_of([lengths[row] for row in order])
        options: dict[str, Any] = {}
        if self._takes_types:
            options["token_type_ids"] = (torch.zeros_like(token_ids) if types is None else types)[None]
        output = self._base(
            input_ids=token_ids[None],
            position_ids=positions[None] + self._first_position,
            return_dict=True,
            **options,
        )
        hidden: Tensor = output.last_hidden_state[0]
        if context.last is not None:
            context.last.tensors.append(hidden if back is None else hidden[back])
        return hidden.new_empty(0, 0, dtype=torch.float32)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[1, T, H, D] of queries, keys and values [1, H, T, D]; each prompt attends to itself."""
        flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        parts = []
        for group in self._groups:
            end = group.start + group.num_prompts * group.length
            q, k, v = (
                tensor[group.start : end].unflatten(0, (group.num_prompts, group.length)).transpose(1, 2)
                for tensor in flat
            )
            attended = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
            parts.append(attended.transpose(1, 2).flatten(0, 1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def attend_joined(self, qkv: Tensor) -> Tensor:
        """[T, H D] of [T, 3 H D], queries before keys before values; each prompt attends to itself."""
        num_heads: int = self.module.config.num_attention_heads
        query, key, value = (part[None] for part in qkv.view(len(qkv), 3, num_heads, -1).permute(1, 2, 0, 3))
        return self.attend(query, key, value, query.shape[-1] ** -0.5)[0].flatten(1)

    def _register(self) -> None:
        # The registration is never removed, so it must not keep the model's weights alive.
        owner = weakref.ref(self)

        def attend(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            scaling: float | None = None,
            **others: object,
        ) -> tuple[Tensor, None]:
            model = owner()
            assert model is not None, "the model of a running module still exists"
            assert attention_mask is None, "no mask is made for an encoder"
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return model.attend(query, key, value, scale), None

        AttentionInterface.register(self._interface, attend)


def _groups_of(lengths: list[int]) -> list[_Group]:
    """lengths: ascending."""
    groups: list[_Group] = []
    start = 0
    for length, equal in groupby(lengths):
        count = len(list(equal))
        groups.append(_Group(start, count, length))
        start += count * length
    return groups


def make_encoder(
    module: PreTrainedModel,
    spec: PoolingSpec,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
) -> EncoderModel:
    """The model with its head, laid out for the device. Raises CheckpointError or UnsupportedModel."""
    pooler = make_pooler(
        spec,
        folder,
        dtype=dtype,
        device=device,
        classify=None if spec.head == "embed" else _classifier(module, spec.head),
    )
    model = EncoderModel(module, pooler)
    fuse_layers(module.base_model, ops, model.attend_joined)
    sample = torch.zeros(1, dtype=torch.int64, device=device)
    context = ForwardContext((), [], [AttentionBatch.of(sample.new_empty(1, 0), [1], [1], 1)])
    with torch.inference_mode():
        prepack_projections(module, ops, lambda: model.forward(sample, sample, sample[:0], context))
    return model


def _classifier(module: PreTrainedModel, head: str) -> Head:
    """From states of tokens [R, H] to logits; the states of first tokens where prompts have classes."""
    classifier = _layer(module, "classifier")
    if head == "token_classify":
        return classifier
    # Heads of sequences take the first of each prompt's tokens.
    if hasattr(module, "pre_classifier"):
        before = _layer(module, "pre_classifier")
        return lambda states: classifier(torch.relu(before(states)))
    pooler = getattr(module.base_model, "pooler", None)
    if pooler is not None:
        return lambda states: classifier(pooler(states[:, None]))
    return lambda states: classifier(states[:, None])


def _layer(module: nn.Module, name: str) -> Head:
    layer = module.get_submodule(name)
    return lambda states: layer(states)
