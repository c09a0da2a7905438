"""Which checkpoints can be served, and by which class. Refuses by name what would run wrongly."""

from __future__ import annotations

from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from engine_svc.model.errors import CheckpointError, UnsupportedModel

_ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def read_config(folder: Path) -> PreTrainedConfig:
    """The folder's config.json as transformers understands it. Code in the folder is never run."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json: not a Hugging Face model folder")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return config


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The transformers class that generates text with this config.

    Raises UnsupportedModel for encoder-decoders, state-space layers, quantized weights and others.
    """
    name = _name(config)
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoders can be served")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"{name} has quantized weights, which cannot be served")
    unknown = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_LAYER_TYPES
    if unknown:
        kinds = ", ".join(sorted(unknown))
        raise UnsupportedModel(
            f"{name} has layers of kind {kinds}; only full and sliding attention can be served"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{name} (model type {config.model_type}) does not generate text")
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    assert isinstance(found, type)
    return found


def max_position(config: PreTrainedConfig) -> int:
    """The longest sequence for which every row of a mixed batch is computed as it would be alone."""
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit is None:
        raise UnsupportedModel(f"{_name(config)} does not say max_position_embeddings")
    rope = getattr(text_config, "rope_parameters", None) or {}
    per_layer_type = rope.values() if all(isinstance(part, dict) for part in rope.values()) else [rope]
    for part in per_layer_type:
        # Beyond this length such a model turns every row's positions by the longest row of the batch.
        if part.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            limit = min(limit, part.get("original_max_position_embeddings") or limit)
    return int(limit)


def _name(config: PreTrainedConfig) -> str:
    return (config.architectures or [type(config).__name__.removesuffix("Config")])[0]
