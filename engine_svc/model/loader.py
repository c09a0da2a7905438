"""From a Hugging Face folder to a model that is ready for its first step. Never touches the network."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from engine_svc.model.checkpoint import Progress, read_weights, weight_files, weights_digest
from engine_svc.model.errors import CheckpointError
from engine_svc.model.facts import ModelFacts
from engine_svc.model.prepacked import prepack_projections
from engine_svc.model.quiet import quiet_transformers
from engine_svc.model.registry import max_position, model_class, read_config
from engine_svc.model.transformers_model import TransformersModel
from engine_svc.model.warm_up import warm_up

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what there is to know about it."""

    model: TransformersModel
    facts: ModelFacts


def ignore_progress(phase: str, done: int, total: int) -> None:
    """For callers who show nobody how far loading is."""


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    num_threads: int | None = None,
    prepack: bool = True,
    progress: Progress = ignore_progress,
) -> LoadedModel:
    """Load the folder at `path` for CPU inference and run it once.

    dtype "auto" takes the checkpoint's own. num_threads: compute threads of this process from now on; None is
    one less than the CPUs it may run on, at least one. progress is told ("weights", bytes done, total),
    then ("warm-up", 0 or 1, 1).
    Raises CheckpointError where files are missing or broken, UnsupportedModel where the kind of model is.
    """
    started_at = time.perf_counter()
    torch.set_num_threads(num_threads or _default_num_threads())
    with quiet_transformers():
        loaded = _load(Path(path), dtype, prepack, progress)
    logger.info(
        "model loaded",
        extra={
            "architecture": loaded.facts.architecture,
            "num_parameters": loaded.facts.num_parameters,
            "dtype": loaded.facts.dtype,
            "num_threads": torch.get_num_threads(),
            "duration_s": round(time.perf_counter() - started_at, 3),
        },
    )
    return loaded


def _default_num_threads() -> int:
    # Compute threads wait for each other many times a step. Where one shares its CPU with other work, all
    # wait for it: on two busy CPUs steps with two threads took 35 times as long as with one.
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _load(folder: Path, dtype: str, prepack: bool, progress: Progress) -> LoadedModel:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: the model must be a local Hugging Face folder")
    config = read_config(folder)
    chosen_class = model_class(config)
    files = weight_files(folder)
    weights = read_weights(files, progress)
    chosen_dtype = _choose_dtype(dtype, config, weights)
    digest = weights_digest(folder, files, weights, chosen_dtype)
    module = _build(chosen_class, config, weights, chosen_dtype, folder)
    del weights
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    if prepack:
        prepack_projections(module)
    progress("warm-up", 0, 1)
    model = TransformersModel(module)
    kv_shapes = warm_up(model)
    progress("warm-up", 1, 1)
    facts = ModelFacts(
        architecture=chosen_class.__name__,
        kv_shapes=kv_shapes,
        vocab_size=config.get_text_config().vocab_size,
        max_position=max_position(config),
        eos_token_ids=_eos_token_ids(folder, config),
        dtype=str(chosen_dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        weights_digest=digest,
    )
    return LoadedModel(model, facts)


def _choose_dtype(wish: str, config: PreTrainedConfig, weights: dict[str, Tensor]) -> torch.dtype:
    if wish != "auto":
        if wish not in _DTYPES:
            raise CheckpointError(f"dtype {wish!r} is unknown; choose auto, {', '.join(_DTYPES)}")
        return _DTYPES[wish]
    stated = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if stated is None:
        stated = next(
            (tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), torch.float32
        )
    if stated not in _DTYPES.values():
        raise CheckpointError(f"the checkpoint is in {stated}, which cannot be computed in; choose a dtype")
    chosen: torch.dtype = stated
    return chosen


def _build(
    chosen_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    weights: dict[str, Tensor],
    dtype: torch.dtype,
    folder: Path,
) -> PreTrainedModel:
    """The module with the weights in it; transformers renames and merges them as the architecture wants."""
    try:
        built: tuple[PreTrainedModel, dict[str, Any]] = chosen_class.from_pretrained(  # type: ignore[assignment]
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            local_files_only=True,
            # What the warm-up compares with; faster ones leave out what they cannot do.
            attn_implementation="eager",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: {chosen_class.__name__} cannot take these weights: {error}"
        ) from error
    module, info = built
    if info["mismatched_keys"]:
        lines = [
            f"{name} has shape {tuple(found)}, config.json says {tuple(wanted)}"
            for name, found, wanted in info["mismatched_keys"]
        ]
        raise CheckpointError(f"{folder}: weights do not fit the config: {_some(lines)}")
    if info["missing_keys"]:
        raise CheckpointError(
            f"{folder} lacks weights of {chosen_class.__name__}: {_some(info['missing_keys'])}"
        )
    if info["unexpected_keys"]:
        logger.warning("weights without a use", extra={"names": _some(info["unexpected_keys"])})
    module.eval()  # type: ignore[no-untyped-call]
    module.requires_grad_(False)
    return module


def _eos_token_ids(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    ids = _as_ids(getattr(config.get_text_config(), "eos_token_id", None))
    if (folder / "generation_config.json").is_file():
        try:
            generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder / 'generation_config.json'} cannot be read: {error}") from error
        ids |= _as_ids(generation_config.eos_token_id)
    return tuple(sorted(ids))


def _as_ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    shown = ", ".join(listed[:_MAX_NAMES_SHOWN])
    return shown + (f" and {len(listed) - _MAX_NAMES_SHOWN} more" if len(listed) > _MAX_NAMES_SHOWN else "")
