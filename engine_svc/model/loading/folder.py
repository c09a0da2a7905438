"""Files of a model folder: config.json, weight files, their headers. Reads no weights, imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.gguf.config import read_config
from engine_svc.model.loading.gguf.file import read_model
from engine_svc.model.loading.gguf.names import read_origins

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
# Of a GGUF file that was opened as a folder, and of its shards.
_GGUF_NAME, _GGUF_SHARDS = "model.gguf", "model-*-of-*.gguf"
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Formats of weights that are not read, by their files.
_FOREIGN_FORMATS = {
    "*.ggml": "GGML",
    "adapter_config.json": "a LoRA adapter",
    "consolidated*.safetensors": "a checkpoint in Mistral's own format",
    "*.onnx": "ONNX",
    "*.msgpack": "a Flax checkpoint",
    "*.h5": "a TensorFlow checkpoint",
}
_READ_FORMATS = (
    "models are read from config.json and safetensors, in float32, bfloat16 or float16 "
    "or quantized (compressed-tensors, gptq, awq, fp8, mxfp4)"
)
_CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    'M.from_pretrained({0!r}).save_pretrained({0!r})"'
)
# Names of dtypes in a header, and in torch.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
# That of the safetensors library.
_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version "
_LENGTH_LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor's entry in a header. `end` is relative to the end of the header, as `start` is.

    A weight of a GGUF file has its size alone there, and its number of bytes.
    """

    name: str
    dtype: str  # a key of DTYPES, or "GGUF"
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one safetensors file."""

    content: bytes
    entries: tuple[HeaderEntry, ...]

    @property
    def data_offset(self) -> int:
        """Where the first tensor begins in the file."""
        return _LENGTH_BYTES + len(self.content)


def check_model_path(path: Path) -> None:
    """Raise CheckpointError unless this is a folder with a config.json."""
    if path.suffix == ".ggml":
        raise CheckpointError(f"{path} is a GGML file, which is not read; {_READ_FORMATS}")
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder: the model must be a Hugging Face folder, a GGUF file, or org/name of "
            "the hub"
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(_foreign(path) or f"{path} is not a model folder: it has no config.json")


def read_json_object(path: Path) -> dict[str, Any]:
    """The content of a file such as config.json. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} cannot be read: it is not a JSON object")
    return content


def stated_max_position(content: Mapping[str, Any]) -> int | None:
    """The longest sequence that the model takes by its config.json; None where that is not stated.

    Never less than what the loaded model takes: defaults of a family may lower it, or a kind of rope.
    """
    part = text_config(content)
    limit = next((part[name] for name in _LENGTH_LIMITS if type(part.get(name)) is int), None)
    if limit is None:
        return None
    # The second is the former name. Parameters may be nested, for each type of layer.
    ropes = [part[key] for key in ("rope_parameters", "rope_scaling") if isinstance(part.get(key), Mapping)]
    ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, Mapping)]
    longest: int = limit
    for scaling in ropes:
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings", limit)
        is_yarn = "yarn" in (scaling.get("rope_type"), scaling.get("type"))
        if is_yarn and isinstance(factor, int | float) and type(original) is int:
            longest = max(longest, int(factor * original))
    return longest


def stated_dtype(content: Mapping[str, Any]) -> str | None:
    """The name of the dtype that config.json states, if it does."""
    part = text_config(content)
    dtype = part.get("dtype") or part.get("torch_dtype")
    return dtype if isinstance(dtype, str) else None


def weight_files(folder: Path) -> list[Path]:
    """The weight files of the folder, all present: one file, or the shards that the index lists.

    Where there are both, the single file is used, as in transformers. Safetensors, or a GGUF file.
    """
    if (folder / _SINGLE_NAME).is_file():
        return [folder / _SINGLE_NAME]
    index = folder / _INDEX_NAME
    if index.is_file():
        shards = [folder / name for name in _shard_names(index)]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(shards)} weight files: {first_names(missing)}"
            )
        return shards
    if ggufs := _gguf_files(folder):
        return ggufs
    pickles = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has weights only as {first_names(pickles)}; files that run code when read "
            f"are refused: convert them to safetensors with {_CONVERT.format(str(folder))}"
        )
    raise CheckpointError(
        _foreign(folder) or f"{folder} has neither {_SINGLE_NAME} nor {_INDEX_NAME}: no weights to load"
    )


def read_headers(folder: Path) -> list[Header]:
    """The headers of the weight files of a folder, with the model's names. Raises CheckpointError."""
    paths = weight_files(folder)
    if paths[0].suffix != ".gguf":
        return [read_header(path) for path in paths]
    model = read_model(paths)
    origins = read_origins(model, read_config(model)).items()
    entries = [HeaderEntry(name, "GGUF", origin.shape, 0, origin.num_bytes) for name, origin in origins]
    return [Header(b"", tuple(entries))]


def read_header(path: Path) -> Header:
    """The header of a safetensors file. Raises CheckpointError unless the file has all that it describes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            content = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if prefix == _LFS_POINTER:
        raise CheckpointError(f"{path} is a pointer of Git LFS: run `git lfs pull` in {path.parent}")
    if len(prefix) < _LENGTH_BYTES or (len(content) < length <= _MAX_HEADER_BYTES):
        raise CheckpointError(f"{path} is truncated: it ends after {size} bytes, within its header")
    header = Header(content, _entries(path, content))
    described = header.data_offset + max((entry.end for entry in header.entries), default=0)
    if size < described:
        raise CheckpointError(f"{path} is truncated: it has {size} bytes, its header describes {described}")
    if size > described:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, its header describes {described}")
    return header


def first_names(names: list[str]) -> str:
    """The first few names, and the number of further ones."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _entries(path: Path, content: bytes) -> tuple[HeaderEntry, ...]:
    try:
        described = json.loads(content)
        entries = [
            HeaderEntry(name, one["dtype"], tuple(map(int, one["shape"])), *map(int, one["data_offsets"]))
            for name, one in described.items()
            if name != _METADATA
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header cannot be read") from error
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{path}: {entry.name} has dtype {entry.dtype}, which is not read")
    return tuple(entries)


def _gguf_files(folder: Path) -> list[Path]:
    if (folder / _GGUF_NAME).is_file():
        return [folder / _GGUF_NAME]
    return sorted(folder.glob(_GGUF_SHARDS))


def _foreign(folder: Path) -> str | None:
    if ggufs := sorted(folder.glob("*.gguf")):
        listed = first_names([path.name for path in ggufs])
        return f"{folder} has {listed}: name the file itself to serve it, {ggufs[0]}"
    for pattern, name in _FOREIGN_FORMATS.items():
        names = sorted(path.name for path in folder.glob(pattern))
        if names:
            return f"{folder} has {first_names(names)}: {name} is not read; {_READ_FORMATS}"
    return None


def text_config(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the decoder, with what is stated beside it."""
    inner = content.get("text_config")
    return {**content, **inner} if isinstance(inner, Mapping) else content


def _shard_names(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a weights index: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r}, which is not a safetensors file of its folder")
    if not names:
        raise CheckpointError(f"{index} names no weight files")
    return names
