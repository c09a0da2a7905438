"""Loads the encoder of a checkpoint, by the class that transformers has for the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, PreTrainedConfig

from engine_svc.core.encoder_spec import EncoderSpec
from engine_svc.model.encoders.encoder import ItemEncoder
from engine_svc.model.encoders.llava import LlavaEncoder
from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.part_names import is_of_decoder
from engine_svc.model.loading.weights import WeightReader, lazy_weights
from engine_svc.model.transformers.load import build_module
from engine_svc.model.transformers.registry import FOREIGN_ERRORS, quiet_transformers

_FAMILIES: dict[str, Callable[[Any, torch.dtype], ItemEncoder]] = {"llava": LlavaEncoder}


def load_item_encoder(
    spec: EncoderSpec, reader: WeightReader, folder: Path, dtype: torch.dtype, device: torch.device
) -> ItemEncoder:
    """The encoder with its weights, which are all of the reader's that are not the decoder's.

    Raises CheckpointError, UnsupportedModel.
    """
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            config = _without_decoder(config)
    except FOREIGN_ERRORS as error:
        raise CheckpointError(f"{folder}/config.json cannot be read: {error}") from error
    model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if not isinstance(model_class, type):
        raise UnsupportedModel(f"transformers has no model of type {spec.family} with its encoder")
    weights = {name: lazy for name, lazy in lazy_weights(reader).items() if not is_of_decoder(name)}
    with quiet_transformers():
        module = build_module(
            model_class, config, weights, dtype, folder, attention="sdpa", is_unused=_is_of_decoder_part
        )
        # Its embeddings and head, without weights.
        module.model.language_model = None
        module.lm_head = None
        module.to(device)
    return _FAMILIES[spec.family](module, dtype)


def _without_decoder(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the same model with a decoder that has next to no weights: it is loaded apart."""
    text_config = config.get_text_config()
    text_config.num_hidden_layers = 0
    text_config.vocab_size = 1
    text_config.pad_token_id = None
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = []
    return config


def _is_of_decoder_part(name: str) -> bool:
    """By its name in transformers' module."""
    return name.startswith(("model.language_model.", "lm_head."))
