"""The weights of a checkpoint: from which folders they come, and their fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.folder import first_names, weight_files
from engine_svc.model.loading.safetensors_file import SafetensorsFile, StoredTensor

# Tensors by name, each with its file.
Tensors = dict[str, tuple[SafetensorsFile, StoredTensor]]

_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where weights come from: a folder, and the folders of tensors that are read from others instead."""

    folder: Path
    replaced: Mapping[str, Path] = field(default_factory=dict)  # by the tensor's name

    def replacing(self, names: Collection[str], folder: Path | None) -> Checkpoint:
        """This checkpoint with these tensors read from `folder`; no names: all of its tensors, and no others.

        None: from the folder of all others.
        """
        folder = folder or self.folder
        if not names:
            return Checkpoint(folder)
        return Checkpoint(self.folder, {**self.replaced, **dict.fromkeys(names, folder)})


def replaced_tensors(checkpoint: Checkpoint) -> Tensors:
    """The tensors that are read from other folders. Raises CheckpointError if a folder lacks one."""
    tensors: Tensors = {}
    for folder in set(checkpoint.replaced.values()):
        names = {name for name, source in checkpoint.replaced.items() if source == folder}
        for path in weight_files(folder):
            file = SafetensorsFile(path)
            tensors |= {name: (file, stored) for name, stored in file.tensors.items() if name in names}
        if missing := sorted(names - tensors.keys()):
            raise CheckpointError(f"{folder} lacks {first_names(missing)}")
    return tensors


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
    tensors = {name: (file, stored) for file in files for name, stored in file.tensors.items()} | replaced
    for name in sorted(replaced):
        digest.update(f"{name} {replaced[name][1].dtype} {replaced[name][1].shape}".encode())
    for name in sorted(tensors):
        file, stored = tensors[name]
        digest.update(file.sample(stored, _SAMPLE_BYTES))
    digest.update(str(dtype).encode())
    return digest.hexdigest()
