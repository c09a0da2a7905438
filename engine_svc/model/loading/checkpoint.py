"""Finds and fingerprints the files of a checkpoint folder. Safetensors only, no pickles."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.safetensors_file import SafetensorsFile, StoredTensor

# Tensors by name, each with its file.
Tensors = dict[str, tuple[SafetensorsFile, StoredTensor]]

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where weights come from: a folder, and the folders of tensors that are read from others instead."""

    folder: Path
    replaced: Mapping[str, Path] = field(default_factory=dict)  # by the tensor's name

    def replacing(self, names: Collection[str], folder: Path | None) -> Checkpoint:
        """With these tensors from `folder`; no names: all of it, and nothing from elsewhere.

        None: from the folder of all others.
        """
        folder = folder or self.folder
        if not names:
            return Checkpoint(folder)
        return Checkpoint(self.folder, {**self.replaced, **dict.fromkeys(names, folder)})


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


def replaced_tensors(checkpoint: Checkpoint) -> Tensors:
    """The tensors that are read from other folders. Raises CheckpointError if a folder lacks one."""
    found: Tensors = {}
    for folder in set(checkpoint.replaced.values()):
        names = {name for name, source in checkpoint.replaced.items() if source == folder}
        for path in weight_files(folder):
            file = SafetensorsFile(path)
            found |= {name: (file, stored) for name, stored in file.tensors.items() if name in names}
        if missing := sorted(names - found.keys()):
            raise CheckpointError(f"{folder} lacks {_some(missing)}")
    return found


def weights_digest(
    folder: Path, files: list[SafetensorsFile], dtype: torch.dtype, replaced: Tensors | None = None
) -> str:
    """A sha256 that identifies a model without reading all weights, however the folder is loaded.

    Over config.json, each file's name, size and header, a sample from the middle of each tensor, and the
    dtype; of replaced tensors also over name, dtype and shape.
    """
    replaced = replaced or {}
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in files:
        digest.update(f"{file.path.name} {file.num_bytes}".encode())
        digest.update(file.header)
    found = {name: (file, stored) for file in files for name, stored in file.tensors.items()} | replaced
    for name in sorted(replaced):
        digest.update(f"{name} {replaced[name][1].dtype} {replaced[name][1].shape}".encode())
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
