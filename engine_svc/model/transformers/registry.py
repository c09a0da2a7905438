"""Decides which checkpoints transformers can serve, and by which class. Rejects what would run wrongly."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine_svc.core.encoder_spec import read_encoder_spec
from engine_svc.model.errors import CheckpointError, ModelError, UnsupportedModel
from engine_svc.model.loading.model_config import ModelConfig
from engine_svc.model.transformers.encoder import encoder_class, first_position
from engine_svc.model.transformers.mixers import has_known_mixer

# Kinds of layers by what they keep of a sequence, as transformers names them.
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "hybrid"})
STATE_KINDS = frozenset({"linear_attention", "hybrid"})
_KINDS_WITHOUT_MEMORY = frozenset({"mlp", "moe"})
# Of a model that computes no positions, so that its config need not state a limit.
_MAX_RECURRENT_POSITION = 1 << 17
_LENGTH_LIMITS = ("max_position_embeddings", "max_target_positions", "max_seq_len")
# What transformers raises for unexpected values.
FOREIGN_ERRORS = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StrictDataclassError,
)  # fmt: skip
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def read_config(folder: Path, encoder_head: str | None = None) -> ModelConfig:
    """The folder's config.json as transformers understands it. Code in the folder is never run.

    encoder_head: of an encoder, as in PoolingSpec; None for a decoder.
    Raises CheckpointError, or UnsupportedModel as `model_class` does.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json: not a Hugging Face model folder")
    try:
        with quiet_transformers():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        text_config = config.get_text_config()
        dtype = getattr(text_config, "dtype", None) or getattr(config, "dtype", None)
        if encoder_head is None and read_encoder_spec(folder) is not None:
            # The encoder is loaded apart.
            config = text_config
        for part in (config, text_config):
            # The reader of weights hands them over in full.
            if hasattr(part, "quantization_config"):
                del part.quantization_config
        limit = max_position(config)
        if encoder_head is None:
            chosen_class = model_class(config)
        else:
            chosen_class = encoder_class(config, encoder_head)
            limit -= first_position(config)
    except ModelError:
        raise
    except FOREIGN_ERRORS as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return ModelConfig(
        architecture=chosen_class.__name__,
        vocab_size=text_config.vocab_size,
        max_position=limit,
        eos_token_id=getattr(text_config, "eos_token_id", None),
        dtype=dtype,
        config=config,
        model_class=chosen_class,
    )


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The transformers class that generates text with this config.

    Raises UnsupportedModel for encoder-decoders, state-space layers and others.
    """
    name = _name(config)
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoders can be served")
    text_config = config.get_text_config()
    if getattr(text_config, "cross_attention_layers", None):
        raise UnsupportedModel(f"{name} attends to another model's states in some of its layers")
    kinds = set(stated_kinds(config))
    unknown = kinds - ATTENTION_KINDS - STATE_KINDS - _KINDS_WITHOUT_MEMORY
    if unknown:
        raise UnsupportedModel(
            f"{name} has layers of kind {', '.join(sorted(unknown))}, which are not served"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{name} (model type {config.model_type}) does not generate text")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    assert isinstance(model_class, type)
    states = kinds & STATE_KINDS
    if states and not has_known_mixer(model_class):
        raise UnsupportedModel(
            f"{name} has layers of kind {', '.join(sorted(states))} with states that are not known here"
        )
    return model_class


def stated_kinds(config: PreTrainedConfig) -> Sequence[str]:
    """The kind of each layer of the decoder; () if the config states none: then all have attention."""
    return getattr(config.get_text_config(), "layer_types", None) or ()


def own_config(config: PreTrainedConfig, chosen_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """The config to build the class from: that of the text part if the class implements only this part."""
    if chosen_class.config_class is config.sub_configs.get("text_config"):
        return config.get_text_config()
    return config


def max_position(config: PreTrainedConfig) -> int:
    """The longest sequence for which every row of a mixed batch is computed as it would be alone.

    0 where the config does not state it.
    """
    kinds = stated_kinds(config)
    if kinds and ATTENTION_KINDS.isdisjoint(kinds):
        return _MAX_RECURRENT_POSITION
    text_config = config.get_text_config()
    limits = (getattr(text_config, name, None) for name in _LENGTH_LIMITS)
    limit = next((limit for limit in limits if isinstance(limit, int)), 0)
    rope = getattr(text_config, "rope_parameters", None) or {}
    per_layer_type = rope.values() if all(isinstance(part, dict) for part in rope.values()) else [rope]
    for part in per_layer_type:
        # Beyond this length, these types rotate every row's positions by the longest row of the batch.
        if part.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            limit = min(limit, part.get("original_max_position_embeddings") or limit)
        # The config's own limit may be that before the extension by these parameters.
        if part.get("rope_type") == "yarn" and part.get("original_max_position_embeddings"):
            limit = max(limit, int(part.get("factor", 1.0) * part["original_max_position_embeddings"]))
    return int(limit)


def _name(config: PreTrainedConfig) -> str:
    return (config.architectures or [type(config).__name__.removesuffix("Config")])[0]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside the block transformers shows no progress bars and logs nothing below critical."""
    verbosity = transformers_logging.get_verbosity()
    has_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bar:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
