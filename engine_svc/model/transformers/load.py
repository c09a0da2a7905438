"""Loads a checkpoint into the model class that transformers has for it, bound to the paged cache."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine_svc.core.pooling_spec import PoolingSpec
from engine_svc.model.errors import CheckpointError, UnsupportedModel, listed
from engine_svc.model.loading.model_config import ModelConfig
from engine_svc.model.loading.weights import LazyTensor, WeightReader, lazy_weights
from engine_svc.model.transformers.encoder import EncoderModel, make_encoder
from engine_svc.model.transformers.model import TransformersModel
from engine_svc.model.transformers.registry import own_config, quiet_transformers
from engine_svc.model.transformers.warm_up import WarmModel, warm_up
from triptych_kernels import Ops

logger = logging.getLogger(__name__)

# What a model's code raises for a config or weights that it was not made for.
_FOREIGN_ERRORS = (
    RuntimeError,
    ValueError,
    LookupError,
    ArithmeticError,
    TypeError,
    AttributeError,
    ImportError,
    AssertionError,
)


def load_transformers_model(
    config: ModelConfig,
    reader: WeightReader,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    *,
    samples: bool = True,
) -> tuple[TransformersModel, WarmModel, int]:
    """The model, what its first forwards have shown, and its number of parameters.

    samples: False for a model that only pools, whose checkpoint need not have the head for tokens.
    Raises UnsupportedModel for a model that would run wrongly.
    """
    assert config.model_class is not None, "transformers has read the config"
    with quiet_transformers():
        # On a CPU the packed experts replace these; for a GPU the library's own choice is faster.
        experts = "eager" if device.type == "cpu" else None
        module = build_module(
            config.model_class,
            config.config,
            lazy_weights(reader),
            dtype,
            folder,
            experts=experts,
            is_unused=lambda name: not samples and name == "lm_head.weight",
        )
        reader.finish()
        module.to(device)  # type: ignore[arg-type]  # The stubs of transformers take no device.
        # Counted before warm-up: packed projections keep no parameters.
        num_parameters = module.num_parameters()
        model = TransformersModel(module, ops)
        warm = warm_up(model)
    return model, warm, num_parameters


def load_encoder(
    config: ModelConfig,
    reader: WeightReader,
    folder: Path,
    spec: PoolingSpec,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
) -> tuple[EncoderModel, int]:
    """The encoder with its head, and its number of parameters."""
    assert config.model_class is not None, "transformers has read the config"
    # The layer after the first token's state belongs to a head that is not used here.
    parameters = inspect.signature(config.model_class.__init__).parameters
    options: dict[str, Any] = {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}
    with quiet_transformers():
        module = build_module(
            config.model_class, config.config, lazy_weights(reader), dtype, folder, **options
        )
        reader.finish()
        module.to(device)  # type: ignore[arg-type]  # The stubs of transformers take no device.
        num_parameters = module.num_parameters()
        return make_encoder(module, spec, folder, dtype, device, ops), num_parameters


def build_module(
    chosen_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    weights: Mapping[str, LazyTensor],
    dtype: torch.dtype,
    folder: Path,
    *,
    # The warm-up compares with "eager"; faster implementations skip what they do not support.
    attention: str = "eager",
    experts: str | None = None,
    is_unused: Callable[[str], bool] = lambda name: False,
    **options: Any,
) -> PreTrainedModel:
    """The module with its weights; transformers renames and merges them as the architecture requires.

    is_unused: by its name, whether the checkpoint may lack a weight.
    """
    try:
        built: tuple[PreTrainedModel, dict[str, Any]] = chosen_class.from_pretrained(  # type: ignore[assignment]
            None,
            config=own_config(config, chosen_class),
            state_dict=dict(weights),
            dtype=dtype,
            local_files_only=True,
            attn_implementation=attention,
            experts_implementation=experts,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    except ImportError as error:
        raise UnsupportedModel(
            f"{chosen_class.__name__} needs packages that are not installed: {' '.join(str(error).split())}"
        ) from error
    except _FOREIGN_ERRORS as error:
        raise CheckpointError(
            f"{folder}: {chosen_class.__name__} cannot take these weights: {error}"
        ) from error
    module, info = built
    if info["mismatched_keys"]:
        lines = [
            f"{name} has shape {tuple(stored)}, config.json says {tuple(configured)}"
            for name, stored, configured in info["mismatched_keys"]
        ]
        raise CheckpointError(f"{folder}: weights do not fit the config: {listed(lines)}")
    if missing := [name for name in info["missing_keys"] if not is_unused(name)]:
        raise CheckpointError(f"{folder} lacks weights of {chosen_class.__name__}: {listed(missing)}")
    if info["unexpected_keys"]:
        logger.warning(
            "weights of the checkpoint that the model does not use",
            extra={"names": listed(info["unexpected_keys"])},
        )
    module.eval()  # type: ignore[no-untyped-call]
    module.requires_grad_(False)
    return module
