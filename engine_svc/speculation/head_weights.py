"""Loads draft heads as published: MTP heads in the target's checkpoint, EAGLE-3 heads in their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.facts import KVShape, ModelFacts
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.model.loading.loader import (
    ignore_progress,
    open_weights,
    read_llama_config,
    read_model_config,
)
from engine_svc.model.loading.weights import WeightReader
from engine_svc.model.native.build import DecoderBuilder
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.model.native.spec import DecoderSpec, NotNative, read_spec, rotary_table
from engine_svc.model.parallel import Solo
from engine_svc.speculation.heads import MTP_LAYOUTS, EagleHead, MtpHead, MtpLayout

_EAGLE_PREFIXES = ("midlayer.", "layers.0.", "model.layers.0.", "model.midlayer.")


def load_mtp_head(checkpoint: Checkpoint, target: NativeDecoder, facts: ModelFacts) -> MtpHead:
    """The first MTP head of the checkpoint that `target` was loaded from; it predicts at every depth.

    facts: of the target.  Raises CheckpointError or UnsupportedModel.
    """
    spec = _native_spec(checkpoint.folder)
    reader = open_weights(checkpoint, ignore_progress, device=target.cos_sin.device, dtype=target.dtype)
    layout = _find_layout(spec, reader)
    if layout is None:
        raise CheckpointError(f"{checkpoint.folder} has no MTP head in a layout that is known here")
    builder = DecoderBuilder(spec=spec, weights=reader, ops=target.ops, parallel=Solo(), dtype=target.dtype)
    prefix, hidden = layout.prefix.format(spec.num_layers), spec.hidden_size
    head = None
    if layout.head and prefix + layout.head + ".weight" in reader.names:
        head = builder.linear(
            prefix + layout.head + ".weight", spec.vocab_size, hidden, out_dtype=torch.float32
        )
    window = spec.windows[-1]
    return MtpHead(
        target=target,
        layout=layout,
        token_norm=builder.vector(prefix + layout.token_norm + ".weight", hidden),
        hidden_norm=builder.vector(prefix + layout.hidden_norm + ".weight", hidden),
        projection=builder.linear(prefix + layout.projection + ".weight", hidden, 2 * hidden),
        layer=builder.layer(prefix, spec.num_layers - 1, 0),
        final_norm=builder.vector(prefix + layout.final_norm + ".weight", hidden),
        head=head,
        kv_shapes=(KVShape(spec.num_kv_heads, spec.head_dim, spec.head_dim, window),),
        dtype=target.dtype,
        max_position=facts.max_position,
        vocab_size=facts.vocab_size,
        hidden_size=hidden,
    )


def load_eagle_head(folder: Path, target: NativeDecoder, facts: ModelFacts) -> EagleHead:
    """An EAGLE-3 head of the Llama kind.

    facts: of the target.  Raises CheckpointError or UnsupportedModel.
    """
    content, config, spec = _read_eagle(folder)
    device, hidden = target.cos_sin.device, spec.hidden_size
    reader = open_weights(Checkpoint(folder), ignore_progress, device=device, dtype=target.dtype)
    prefix = next((each for each in _EAGLE_PREFIXES if each + "hidden_norm.weight" in reader.names), None)
    if prefix is None:
        raise CheckpointError(f"{folder} lacks midlayer.hidden_norm.weight, so it is no EAGLE-3 head")
    builder = DecoderBuilder(
        spec=spec,
        weights=reader,
        ops=target.ops,
        parallel=Solo(),
        dtype=target.dtype,
        num_attention_inputs=2 * hidden,
    )

    def full(name: str) -> str:
        return name if name in reader.names else f"model.{name}"

    layers = _hidden_layers(folder, content, len(target.layers))
    num_known = content.get("draft_vocab_size") or spec.vocab_size
    if type(num_known) is not int or num_known < 1:
        raise CheckpointError(f"{folder}: draft_vocab_size is {num_known!r}, which is no number of tokens")
    token_ids = _target_ids(folder, reader, num_known, facts.vocab_size)
    embedding = None
    if full("embed_tokens.weight") in reader.names:
        if spec.vocab_size < facts.vocab_size:
            raise CheckpointError(
                f"{folder}: embed_tokens.weight has {spec.vocab_size} tokens, the model {facts.vocab_size}"
            )
        embedding = builder.table(full("embed_tokens.weight"), spec.vocab_size, hidden)
    elif hidden != target.hidden_size:
        raise CheckpointError(
            f"{folder} lacks embed_tokens.weight; the model's embeddings have {target.hidden_size} values, "
            f"hidden_size is {hidden}"
        )
    # Heads are published with the lengths that they were trained on; what they see is a window.
    max_position = facts.max_position
    return EagleHead(
        target=target,
        embedding=embedding,
        joined=builder.linear(full("fc.weight"), hidden, len(layers) * target.hidden_size),
        hidden_norm=builder.vector(prefix + "hidden_norm.weight", hidden),
        layer=builder.layer(prefix, 0, 0),
        final_norm=builder.vector(full("norm.weight"), hidden),
        head=builder.linear("lm_head.weight", num_known, hidden, out_dtype=torch.float32),
        token_ids=None if token_ids is None else token_ids.to(device),
        cos_sin=rotary_table(config, max_position).to(device),
        kv_shapes=(KVShape(spec.num_kv_heads, spec.head_dim, spec.head_dim),),
        dtype=target.dtype,
        max_position=max_position,
        vocab_size=facts.vocab_size,
        hidden_size=len(layers) * target.hidden_size,
        hidden_layers=layers,
        norms_residual=bool(content.get("norm_before_residual")),
    )


def _native_spec(folder: Path) -> DecoderSpec:
    try:
        return read_spec(read_model_config(folder).config)
    except NotNative as reason:
        raise UnsupportedModel(f"an MTP head needs a native model, but {reason}") from None


def _find_layout(spec: DecoderSpec, reader: WeightReader) -> MtpLayout | None:
    for layout in MTP_LAYOUTS:
        if layout.prefix.format(spec.num_layers) + layout.projection + ".weight" in reader.names:
            return layout
    return None


def _read_eagle(folder: Path) -> tuple[dict[str, Any], Any, DecoderSpec]:
    """The content of config.json, the same as transformers completes it, and the layer's spec."""
    content, config = read_llama_config(folder)
    if content.get("model_type") != "llama" or config.num_hidden_layers != 1:
        raise UnsupportedModel(
            f"{folder}: model_type is {content.get('model_type')} with {config.num_hidden_layers} layers, an "
            "EAGLE-3 head has to be a llama with 1"
        )
    try:
        return content, config, read_spec(config)
    except NotNative as reason:
        raise UnsupportedModel(f"{folder}: {reason}") from None


def _hidden_layers(folder: Path, content: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Before which of the target's layers a head reads; by default those of the published heads."""
    more = content.get("eagle_config")
    name = "eagle_aux_hidden_state_layer_ids"
    stated = content.get(name) or (more.get(name) if isinstance(more, dict) else None)
    layers = stated if isinstance(stated, list) else [] if stated else [2, num_layers // 2, num_layers - 3]
    are_layers = bool(layers) and all(type(each) is int and 0 <= each < num_layers for each in layers)
    if not are_layers or layers != sorted(set(layers)):
        raise CheckpointError(
            f"{folder}: {name} is {stated or layers}, they have to ascend below the model's {num_layers}"
        )
    return tuple(layers)


def _target_ids(folder: Path, reader: WeightReader, num_known: int, vocab_size: int) -> Tensor | None:
    """The target's ids of a head's tokens, [num_known] int64; None if they are the same."""
    if "d2t" not in reader.names:
        if num_known != vocab_size:
            raise CheckpointError(f"{folder} lacks d2t, and predicts {num_known} of {vocab_size} tokens")
        return None
    offsets = reader.read("d2t").cpu().long().flatten()
    if len(offsets) != num_known:
        raise CheckpointError(f"{folder}: d2t has {len(offsets)} entries, draft_vocab_size is {num_known}")
    token_ids = offsets + torch.arange(len(offsets))
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise CheckpointError(
            f"{folder}: d2t gives {len(offsets)} ids from {int(token_ids.min())} to {int(token_ids.max())}, "
            f"it has to give {num_known} below {vocab_size}"
        )
    return token_ids
