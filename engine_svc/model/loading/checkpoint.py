"""Finds and fingerprints the files of a checkpoint folder. Safetensors only, no pickles."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.safetensors_file import SafetensorsFile

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAMPLE_BYTES = 4096


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder, all present: one file, or the shards that the index lists.

    Where there are both, the single file is used, as in transformers.
    """
    if (folder / _SINGLE_NAME).is_file():
        return [folder / _SINGLE_NAME]
    index = folder / _INDEX_NAME
    if index.is_file():
        shards = [folder / name for name in _shard_names(index)]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(shards)} weight files: {_some(missing)}"
            )
        return shards
    pickles = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has weights only as {_some(pickles)}; files that run code when read are refused: "
            "convert them to safetensors"
        )
    raise CheckpointError(f"{folder} has neither {_SINGLE_NAME} nor {_INDEX_NAME}: no weights to load")


def weights_digest(folder: Path, files: list[SafetensorsFile], dtype: torch.dtype) -> str:
    """A sha256 that identifies a model without reading all weights, however the folder is loaded.

    Over config.json, each file's name, size and header, a sample from the middle of each tensor, and the
    dtype.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in files:
        digest.update(f"{file.path.name} {file.num_bytes}".encode())
        digest.update(file.header)
    found = {name: (file, stored) for file in files for name, stored in file.tensors.items()}
    for name in sorted(found):
        file, stored = found[name]
        digest.update(file.sample(stored, _SAMPLE_BYTES))
    digest.update(str(dtype).encode())
    return digest.hexdigest()


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


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
