"""Reads the weights of a checkpoint, one tensor at a time. Knows files and tensors, no architecture."""

from __future__ import annotations

import threading
from pathlib import Path
from types import EllipsisType

import torch
from torch import Tensor

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.checkpoint import Tensors
from engine_svc.model.loading.progress import Progress
from engine_svc.model.loading.safetensors_file import SafetensorsFile, StoredTensor

# Of a decoder that was saved without its head: its names lack the prefix of the body.
_EMBEDDING = "embed_tokens.weight"


class WeightReader:
    """Reads tensors on request, and keeps none of them.

    Progress counts bytes of the phase "weights"; `finish` ends it. Floating point tensors come in `dtype`
    (None: as stored), all on `device`. If two files have the same name, the later file's tensor is used.
    `replaced` are tensors from elsewhere that take the place of those of the files. `body` is the prefix that
    a decoder's names get where it was saved without its head, and they lack it.
    Several threads may read; progress is reported under a lock, in the thread that reads.
    `names` are the tensors of the checkpoint.
    Raises CheckpointError for files that cannot be read and names that they lack.
    """

    def __init__(
        self,
        files: list[Path],
        progress: Progress,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        replaced: Tensors | None = None,
        body: str = "",
    ) -> None:
        self.files = [SafetensorsFile(path) for path in files]
        entries = {name: (file, entry) for file in self.files for name, entry in file.tensors.items()}
        prefix = body if _EMBEDDING in entries else ""
        self._stored = {prefix + name: entry for name, entry in entries.items()}
        self.names = frozenset(self._stored)
        self.replaced = {prefix + name: entry for name, entry in (replaced or {}).items()}
        for name, (file, stored) in self.replaced.items():
            shape = self.shape(name)
            if stored.shape != shape:
                raise CheckpointError(f"{file.path}: {name} has shape {stored.shape}, it replaces {shape}")
        self._stored |= self.replaced
        self._unread = dict.fromkeys(self._stored)
        self._device = torch.device(device)
        self._dtype = dtype
        self._progress = progress
        self._total = sum(file.num_bytes for file in self.files)
        self._done = 0
        self._lock = threading.Lock()
        progress("weights", 0, self._total)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._find(name)[1].shape

    def main_dtype(self) -> torch.dtype | None:
        """The floating point dtype of the first tensor that has one."""
        stored = (stored.dtype for _, stored in self._stored.values())
        return next((dtype for dtype in stored if dtype.is_floating_point), None)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Read floating point tensors in this dtype from now on. It may depend on the files."""
        self._dtype = dtype

    def read(self, name: str) -> Tensor:
        """The tensor, in memory of its own."""
        return self._converted(self.read_stored(name))

    def read_stored(self, name: str) -> Tensor:
        """The tensor as stored, in host memory."""
        file, stored = self._find(name)
        return self._counted(name, file.read(stored))

    def read_slice(self, name: str, dim: int, start: int, end: int) -> Tensor:
        """Indices start to end - 1 of dimension `dim`, in memory of their own; the rest is not read."""
        file, stored = self._find(name)
        if not 0 <= dim < len(stored.shape) or not 0 <= start <= end <= stored.shape[dim]:
            raise CheckpointError(
                f"{name} has shape {stored.shape}: it has no indices {start} to {end} in dimension {dim}"
            )
        return self._converted(self._counted(name, file.read_slice(stored, dim, start, end)))

    def unread(self) -> list[str]:
        """Names of the tensors that have not been read."""
        return list(self._unread)

    def finish(self) -> None:
        """Report that reading is over, even if tensors were left unread."""
        self._done = self._total
        self._progress("weights", self._total, self._total)

    def _find(self, name: str) -> tuple[SafetensorsFile, StoredTensor]:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"the checkpoint lacks {name}")
        return stored

    def _counted(self, name: str, tensor: Tensor) -> Tensor:
        with self._lock:
            self._unread.pop(name, None)
            # A tensor may be read twice, for two uses; it counts once.
            self._done = min(self._total, self._done + tensor.nbytes)
            self._progress("weights", self._done, self._total)
        return tensor

    def _converted(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else None
        return tensor.to(device=self._device, dtype=dtype)


class LazyTensor:
    """A tensor that is read, as stored, when it is sliced, as transformers does to assign the tensor."""

    def __init__(self, reader: WeightReader, name: str) -> None:
        self._reader = reader
        self._name = name

    def __getitem__(self, index: EllipsisType) -> Tensor:
        return self._reader.read_stored(self._name)


def lazy_weights(reader: WeightReader) -> dict[str, LazyTensor]:
    """Every tensor of the reader by name, none of them read."""
    return {name: LazyTensor(reader, name) for name in reader.unread()}
