"""Reads the tensors of one safetensors file. Knows no model and no folder."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.folder import DTYPES, read_header
from engine_svc.model.loading.stored_tensor import StoredTensor, read_rows, read_whole, sample_middle

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, ours) for name, ours in DTYPES.items()}


class SafetensorsFile:
    """One file, checked when it is opened. Tensors are read, not memory-mapped: no mapping remains.

    Raises CheckpointError for a file that is no safetensors file, is truncated, or has a dtype that torch
    lacks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        try:
            self.num_bytes = path.stat().st_size
            # The library checks the rest: offsets in order, without gaps, that fit shapes and dtypes.
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self.header = header.content
        self.tensors = {
            entry.name: StoredTensor(
                entry.name,
                _DTYPES[entry.dtype],
                entry.shape,
                header.data_offset + entry.start,
                entry.end - entry.start,
            )
            for entry in header.entries
        }

    def read(self, stored: StoredTensor) -> Tensor:
        """The whole tensor, as stored, in memory of its own."""
        return read_whole(self.path, stored)

    def read_slice(self, stored: StoredTensor, dim: int, start: int, end: int) -> Tensor:
        """Indices start to end - 1 of dimension `dim`, contiguous; the rest is not kept in memory."""
        if dim == 0:
            return read_rows(self.path, stored, start, end)
        try:
            with safe_open(self.path, framework="pt") as file:
                part: Tensor = file.get_slice(stored.name)[(*[slice(None)] * dim, slice(start, end))]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return part.clone(memory_format=torch.contiguous_format)

    def sample(self, stored: StoredTensor, num_bytes: int) -> bytes:
        """At most `num_bytes` bytes of the tensor, from its middle on."""
        return sample_middle(self.path, stored, num_bytes)
