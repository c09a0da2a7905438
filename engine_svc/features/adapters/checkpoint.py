"""Folders of LoRA adapters as PEFT saves them: what they hold, and whether that fits a model. No torch."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_svc.model.errors import CheckpointError, listed
from engine_svc.model.loading.folder import HeaderEntry, read_header, read_headers, read_json_object
from engine_svc.model.loading.formats.sources import weight_sources

# Why an adapter cannot be served.
AdapterError = CheckpointError

CONFIG_NAME = "adapter_config.json"
_WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_BODY = "model."  # before the names of a decoder's modules, but for the head's
# The same where the decoder is the text part of a model.
_TEXT_PART = re.compile(r"^(model\.language_model|language_model\.model)\.")
_MAX_BYTES = 4 << 30
# By dtype of the file: an integer of the same size, and the bits of the exponent, all set if not finite.
_FINITE: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F32": (np.uint32, 0x7F800000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}
# What an adapter may have beside additions, by the key that turns it on.
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of its own",
    "modules_to_save": "whole modules",
    "layer_replication": "layers that are repeated",
    "target_parameters": "additions to experts, or to other parameters that are no module",
    "trainable_token_indices": "whole embeddings of tokens",
    "alora_invocation_tokens": "tokens that activate it (aLoRA)",
    "use_qalora": "additions to quantized groups (QALoRA)",
    "megatron_config": "layers of Megatron",
    "use_bdlora": "matrices of diagonal blocks (BD-LoRA)",
    "kasa_config": "singular values of its own (KaSA)",
    "arrow_config": "a choice among adapters (Arrow)",
    "monteclora_config": "samples of its matrices (MonteCLoRA)",
}
# Ways to begin a training that take a part out of the model's weights: the adapter belongs to what is left.
_CHANGES_WEIGHTS = re.compile("pissa|corda|olora|loftq|lora_ga", re.IGNORECASE)
_OF_EXPERTS = re.compile(r"(^|\.)(experts|block_sparse_moe)(\.|$)")
_PARTS = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_embedding_A": "down",
    "lora_embedding_B": "up",
}


@dataclass(frozen=True, slots=True)
class AdapterWeight:
    """The addition to the weight of one module: scale * up down, [outputs, rank] and [rank, inputs].

    module: see `decoder_name`.
    """

    module: str
    down: HeaderEntry
    up: HeaderEntry
    scale: float


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """An adapter that fits the model. digest: hex sha256 of its config and its weights file."""

    folder: Path
    digest: str
    rank: int  # the highest


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that fits the model, by its config and the header of its weights."""

    folder: Path
    weights: tuple[AdapterWeight, ...]
    data_offset: int  # of the tensors in the file

    @property
    def path(self) -> Path:
        """The file of the weights."""
        return self.folder / _WEIGHTS_NAME


def decoder_name(module: str) -> str:
    """The name of a model's module where the model is a decoder with its head alone.

    A checkpoint of text and images has its decoder under another name, but adapters may have been trained on
    a class that has the decoder alone.
    """
    return _TEXT_PART.sub(_BODY, module)


def module_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a model's modules, by `decoder_name`. Raises CheckpointError."""
    entries = [entry for header in read_headers(model) for entry in header.entries]
    sources = weight_sources(model, read_json_object(model / "config.json"), entries)
    weights = {entry.name: entry.shape for entry in entries}
    weights |= {name: source.shape for name, source in sources.items()}
    shapes = {
        decoder_name(name.removesuffix(".weight")): shape
        for name, shape in weights.items()
        if name.endswith(".weight")
    }
    # A decoder that was saved without its head.
    if "embed_tokens" in shapes:
        shapes = {_BODY + name: shape for name, shape in shapes.items()}
    for name, shape in list(shapes.items()):
        # A head that is tied to the embeddings has no weight of its own.
        if name.endswith("embed_tokens"):
            shapes.setdefault("lm_head", shape)
    return shapes


def check_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]], max_rank: int) -> CheckedAdapter:
    """The adapter in a folder, whose numbers are finite. Reads everything once; arguments as below."""
    files = describe_adapter(folder, shapes, max_rank)
    content = read_content(files)
    for weight in files.weights:
        for entry in (weight.down, weight.up):
            first = files.data_offset + entry.start
            _check_finite(files.path, entry, np.frombuffer(content, np.uint8, entry.end - entry.start, first))
    rank = max(weight.down.shape[0] for weight in files.weights)
    return CheckedAdapter(folder, digest_of(files, content), rank)


def read_content(files: AdapterFiles) -> bytes:
    """The file of the weights. Raises CheckpointError."""
    try:
        return files.path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{files.path} cannot be read: {error}") from error


def digest_of(files: AdapterFiles, content: bytes) -> str:
    """Hex sha256 of the config and of the content of the weights file. Raises CheckpointError."""
    try:
        digest = hashlib.sha256((files.folder / CONFIG_NAME).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{files.folder} cannot be read: {error}") from error
    digest.update(content)
    return digest.hexdigest()


def describe_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]], max_rank: int) -> AdapterFiles:
    """What an adapter's config and the header of its weights say.

    shapes: see `module_shapes`. Raises CheckpointError for one that cannot be read, has what is not served,
    or does not fit the model: key, value and limit, short enough for a status.
    """
    config = read_json_object(folder / CONFIG_NAME)
    _check_config(folder, config, max_rank)
    path = folder / _WEIGHTS_NAME
    if not path.is_file():
        pickles = sorted(each.name for pattern in ("*.bin", "*.pt", "*.pth") for each in folder.glob(pattern))
        why = f", but {pickles[0]}: files that run code when read are refused" if pickles else ""
        raise CheckpointError(f"{folder.name} has no {_WEIGHTS_NAME}{why}")
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise CheckpointError(f"{path.parent.name} has {size} bytes, the limit is {_MAX_BYTES}")
    header = read_header(path)
    weights = [
        _weight(path, module, parts, config, shapes, max_rank)
        for module, parts in sorted(_by_module(path, header.entries).items())
    ]
    if not weights:
        raise CheckpointError(f"{path.parent.name} has no tensors")
    return AdapterFiles(folder, tuple(weights), header.data_offset)


def _check_config(folder: Path, config: Mapping[str, Any], max_rank: int) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{folder.name}: peft_type is {kind!r}, served is LORA")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise CheckpointError(f"{folder.name}: {key} is {config[key]!r}: {what} is not served")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and _CHANGES_WEIGHTS.match(start):
        raise CheckpointError(
            f"{folder.name}: init_lora_weights is {start!r}, which changes the model's weights: PEFT "
            "converts such an adapter (path_initial_model_for_weight_conversion)"
        )
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{folder.name}: bias is {config['bias']!r}, served is none")
    ranks = {"r": config.get("r"), **_pattern(folder, config, "rank_pattern")}
    for key, rank in ranks.items():
        if type(rank) is not int or not 1 <= rank <= max_rank:
            raise CheckpointError(
                f"{folder.name}: rank {key} is {rank!r}, it takes 1 to {max_rank} (--max-lora-rank)"
            )
    alphas = {"lora_alpha": config.get("lora_alpha"), **_pattern(folder, config, "alpha_pattern")}
    for key, alpha in alphas.items():
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise CheckpointError(f"{folder.name}: {key} is {alpha!r}, it takes a number")


def _pattern(folder: Path, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict):
        raise CheckpointError(f"{folder.name}: {name} is {pattern!r}, it takes an object")
    for key in pattern:
        try:
            re.compile(_matching(key))
        except re.error as error:
            raise CheckpointError(
                f"{folder.name}: {name} has {key!r}, no regular expression: {error}"
            ) from error
    return pattern


def _by_module(path: Path, entries: tuple[HeaderEntry, ...]) -> dict[str, dict[str, HeaderEntry]]:
    parts_of: dict[str, dict[str, HeaderEntry]] = {}
    for entry in entries:
        suffix = next((suffix for suffix in _PARTS if entry.name.endswith("." + suffix)), None)
        if suffix is None or not entry.name.startswith(_PREFIX):
            raise CheckpointError(
                f"{path.parent.name} has {entry.name}: only {_PREFIX}*.lora_A and lora_B are served"
            )
        module = entry.name.removeprefix(_PREFIX).removesuffix("." + suffix)
        parts_of.setdefault(module, {})[_PARTS[suffix]] = entry
    return parts_of


def _weight(
    path: Path,
    module: str,
    parts: Mapping[str, HeaderEntry],
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    max_rank: int,
) -> AdapterWeight:
    if _OF_EXPERTS.search(module):
        raise CheckpointError(
            f"{path.parent.name} has additions to {module}: those to experts are not served"
        )
    # PEFT names the modules of what was trained, which may have been the model without its head.
    names = decoder_name(module), decoder_name(_BODY + module)
    name = next((each for each in names if each in shapes), None)
    if name is None:
        raise CheckpointError(f"{path.parent.name} has additions to {module}, the model has no such module")
    if parts.keys() != {"down", "up"}:
        present = "".join(entry.name for entry in parts.values())
        raise CheckpointError(f"{path.parent.name} has {present} without its counterpart")
    down, up = parts["down"], parts["up"]
    for entry in (down, up):
        if entry.dtype not in _FINITE or len(entry.shape) != 2:
            raise CheckpointError(
                f"{path.parent.name}: {entry.name} is {entry.dtype} {list(entry.shape)}, not a matrix of "
                f"{listed(_FINITE)}"
            )
    rank, stated = down.shape[0], _stated(config, "rank_pattern", module, config["r"])
    if rank > max_rank or rank != stated:
        raise CheckpointError(
            f"{path.parent.name}: {down.name} has rank {rank}, {CONFIG_NAME} says {stated}, the limit is "
            f"{max_rank}"
        )
    shape, weight_shape = (up.shape[0], down.shape[1]), shapes[name]
    # Embeddings, and projections of GPT-2 (Conv1D), are stored with their inputs first.
    is_turned = down.name.endswith("lora_embedding_A") or config.get("fan_in_fan_out")
    if up.shape[1] != rank or shape != (tuple(reversed(weight_shape)) if is_turned else weight_shape):
        raise CheckpointError(
            f"{path.parent.name}: additions to {module} have shapes {list(up.shape)} and "
            f"{list(down.shape)}, its weight "
            f"has {list(weight_shape)}"
        )
    alpha = _stated(config, "alpha_pattern", module, config["lora_alpha"])
    return AdapterWeight(name, down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _stated(config: Mapping[str, Any], name: str, module: str, default: Any) -> Any:
    """The value for a module: that of the first pattern which matches the end of its name, as in PEFT."""
    for key, value in (config.get(name) or {}).items():
        if re.match(_matching(key), module):
            return value
    return default


def _matching(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _check_finite(path: Path, entry: HeaderEntry, content: npt.NDArray[np.uint8]) -> None:
    kind, exponent = _FINITE[entry.dtype]
    if ((content.view(kind) & exponent) == exponent).any():
        raise CheckpointError(f"{path.parent.name}: {entry.name} has elements that are not finite")
