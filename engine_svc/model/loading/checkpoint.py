"""The weights of a checkpoint: from which folders they come, and their fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.folder import first_names, weight_files
from engine_svc.model.loading.safetensors_file import SafetensorsFile
from engine_svc.model.loading.stored_tensor import StoredTensor

_SAMPLE_BYTES = 4096


class WeightFile(Protocol):
    """A file with tensors, of any format. Reading raises CheckpointError."""

    @property
    def path(self) -> Path: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def header(self) -> bytes:
        """What the file says of its tensors."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def read(self, stored: StoredTensor) -> Tensor:
        """The whole tensor, as stored, in memory of its own."""

    def read_slice(self, stored: StoredTensor, dim: int, start: int, end: int) -> Tensor:
        """Indices start to end - 1 of dimension `dim`, contiguous; the rest is not kept in memory."""

    def sample(self, stored: StoredTensor, num_bytes: int) -> bytes:
        """At most `num_bytes` bytes of the tensor, from its middle on."""


# Tensors by name, each with its file.
Tensors = dict[str, tuple[WeightFile, StoredTensor]]


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
    folder: Path, files: Sequence[WeightFile], dtype: torch.dtype, replaced: Tensors | None = None
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
