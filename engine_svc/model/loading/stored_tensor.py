"""One tensor as stored in a file, and the reading of its bytes. Knows no format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_svc.model.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as stored in its file, row-major."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte, from the beginning of the file
    num_bytes: int


def read_rows(path: Path, stored: StoredTensor, start: int, end: int) -> Tensor:
    """Indices start to end - 1 of the first dimension, in memory of their own. Raises CheckpointError."""
    row_bytes = stored.num_bytes // stored.shape[0] if stored.shape[0] else 0
    return _read_at(path, stored, stored.offset + start * row_bytes, (end - start, *stored.shape[1:]))


def read_whole(path: Path, stored: StoredTensor) -> Tensor:
    """The whole tensor, in memory of its own. Raises CheckpointError."""
    return _read_at(path, stored, stored.offset, stored.shape)


def sample_middle(path: Path, stored: StoredTensor, num_bytes: int) -> bytes:
    """At most `num_bytes` bytes of the tensor, from its middle on."""
    middle = stored.num_bytes // 2
    with path.open("rb") as file:
        file.seek(stored.offset + middle)
        return file.read(min(num_bytes, stored.num_bytes - middle))


def _read_at(path: Path, stored: StoredTensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.empty(shape, dtype=stored.dtype)
    if not tensor.numel():
        return tensor
    bytes_of_it: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    room = memoryview(bytes_of_it)  # type: ignore[arg-type]  # The stubs do not know that arrays are buffers.
    num_read = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            # One call reads at most 2 GiB.
            while num_read < len(room):
                num_new = file.readinto(room[num_read:])
                if not num_new:
                    raise CheckpointError(f"{path} ended inside of {stored.name}: it has changed")
                num_read += num_new
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return tensor
