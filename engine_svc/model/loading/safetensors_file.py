"""Reads the tensors of one safetensors file. Knows no model and no folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.folder import DTYPES, read_header

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, ours) for name, ours in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as stored in its file, row-major."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte, from the beginning of the file
    num_bytes: int


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
        return self._read_at(stored, stored.offset, stored.shape)

    def read_slice(self, stored: StoredTensor, dim: int, start: int, end: int) -> Tensor:
        """Indices start to end - 1 of dimension `dim`, contiguous; the rest is not kept in memory."""
        shape = (*stored.shape[:dim], end - start, *stored.shape[dim + 1 :])
        if dim == 0:
            row_bytes = stored.num_bytes // stored.shape[0] if stored.shape[0] else 0
            return self._read_at(stored, stored.offset + start * row_bytes, shape)
        try:
            with safe_open(self.path, framework="pt") as file:
                part: Tensor = file.get_slice(stored.name)[(*[slice(None)] * dim, slice(start, end))]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return part.clone(memory_format=torch.contiguous_format)

    def sample(self, stored: StoredTensor, num_bytes: int) -> bytes:
        """At most `num_bytes` bytes of the tensor, from its middle on."""
        middle = stored.num_bytes // 2
        with self.path.open("rb") as file:
            file.seek(stored.offset + middle)
            return file.read(min(num_bytes, stored.num_bytes - middle))

    def _read_at(self, stored: StoredTensor, offset: int, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=stored.dtype)
        if not tensor.numel():
            return tensor
        bytes_of_it: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
        room = memoryview(bytes_of_it)  # type: ignore[arg-type]  # The stubs do not know that arrays are buffers.
        num_read = 0
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(offset)
                # One call reads at most 2 GiB.
                while num_read < len(room):
                    num_new = file.readinto(room[num_read:])
                    if not num_new:
                        raise CheckpointError(f"{self.path} ended inside of {stored.name}: it has changed")
                    num_read += num_new
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return tensor
