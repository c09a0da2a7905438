"""Reads the weights of a checkpoint, one tensor at a time. Knows files and tensors, no architecture."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Protocol, overload, runtime_checkable

import torch
from torch import Tensor

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.checkpoint import Tensors, WeightFile
from engine_svc.model.loading.gguf.weights import open_gguf
from engine_svc.model.loading.progress import Progress
from engine_svc.model.loading.safetensors_file import SafetensorsFile
from engine_svc.model.loading.stored_tensor import StoredTensor
from triptych_kernels import QuantizedWeight, as_tensor

# Of a decoder that was saved without its head: its names lack the prefix of the body.
_EMBEDDING = "embed_tokens.weight"


class WeightSource(Protocol):
    """A weight that is stored as something else: the tensors of the files that it is made of, and how."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def tensors(self) -> tuple[str, ...]:
        """Their names, as the files have them; they are no weights of their own."""

    def read(self, read: Callable[[str], Tensor]) -> Tensor | QuantizedWeight:
        """The weight.  read: a tensor as stored, by its name. Raises CheckpointError for broken content."""


@runtime_checkable
class ExpertsSource(Protocol):
    """A WeightSource of all experts' matrices, [E, inputs, outputs], that can be read one by one."""

    def read_expert(
        self, index: int, read_rows: Callable[[str, int, int], Tensor]
    ) -> Tensor | QuantizedWeight:
        """[outputs, inputs] of one expert.  read_rows: rows of a tensor, by its name, their first and end."""


class WeightReader:
    """Reads tensors on request, and keeps none of them.

    Progress counts bytes of the phase "weights"; `finish` ends it. Floating point tensors come in `dtype`
    (None: as stored), all on `device`. If two files have the same name, the later file's tensor is used.
    `replaced` are tensors from elsewhere that take the place of those of the files. `body` is the prefix that
    a decoder's names get where it was saved without its head, and they lack it. `sources` are the weights
    that are stored as other tensors, by the names that they would have in the files. `rename`: from names in
    the files to those that this reader has.
    Several threads may read; progress is reported under a lock, in the thread that reads.
    `names` are the weights of the checkpoint, `quantized` those of `sources`, `num_bytes` is the files' size.
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
        sources: Mapping[str, WeightSource] | None = None,
        rename: Callable[[str], str] = str,
    ) -> None:
        self.files, of_files = _opened(files)
        entries = {name: (file, entry) for file in self.files for name, entry in file.tensors.items()}
        sources = sources or {}
        prefix = body if _EMBEDDING in entries or _EMBEDDING in sources else ""

        def name_of(name: str) -> str:
            return prefix + rename(name)

        self._name_of = name_of
        self._stored = {name_of(name): entry for name, entry in entries.items()}
        made = {**of_files, **sources}
        self._sources = {name_of(name): source for name, source in made.items()}
        self.quantized = frozenset(name_of(name) for name in sources)
        parts = {name_of(part) for source in self._sources.values() for part in source.tensors}
        self.names = frozenset(self._stored.keys() - parts | self._sources.keys())
        self.replaced = {name_of(name): entry for name, entry in (replaced or {}).items()}
        for name, (file, stored) in self.replaced.items():
            shape = self.shape(name)
            if stored.shape != shape:
                raise CheckpointError(f"{file.path}: {name} has shape {stored.shape}, it replaces {shape}")
            # A tensor of a format may have the name of the weight that is made of it.
            if name not in self.quantized:
                self._sources.pop(name, None)
        self._stored |= self.replaced
        self._unread = {name: None for name in (*self._stored, *self._sources) if name in self.names}
        self._device = torch.device(device)
        self._dtype = dtype
        self._progress = progress
        self.num_bytes = sum(file.num_bytes for file in self.files)
        self._done = 0
        self._lock = threading.Lock()
        progress("weights", 0, self.num_bytes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        source = self._sources.get(name)
        return self._find(name)[1].shape if source is None else source.shape

    def main_dtype(self) -> torch.dtype | None:
        """The floating point dtype of the first tensor that is a weight as it is and has one."""
        plain = self.names - self.quantized
        stored = (stored.dtype for name, (_, stored) in self._stored.items() if name in plain)
        return next((dtype for dtype in stored if dtype.is_floating_point), None)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Read floating point tensors in this dtype from now on. It may depend on the files."""
        self._dtype = dtype

    def read(self, name: str) -> Tensor:
        """The tensor, in memory of its own; a quantized weight is dequantized."""
        return as_tensor(self.read_weight(name))

    def read_weight(self, name: str) -> Tensor | QuantizedWeight:
        """The weight, in memory of its own; a quantized one stays so, for rows of the reader's dtype."""
        return self._converted(self._stored_weight(name))

    def read_stored(self, name: str) -> Tensor:
        """The tensor as stored, in host memory; a quantized weight is dequantized."""
        weight = self._stored_weight(name)
        return weight if isinstance(weight, Tensor) else weight.to(dtype=self._dtype).dequantize()

    def read_slice(self, name: str, dim: int, start: int, end: int) -> Tensor | QuantizedWeight:
        """Indices start to end - 1 of dimension `dim` of a weight, which stays quantized if it is.

        In memory of their own; the rest is not kept.
        """
        shape = self.shape(name)
        if not 0 <= dim < len(shape) or not 0 <= start <= end <= shape[dim]:
            raise CheckpointError(
                f"{name} has shape {shape}: it has no indices {start} to {end} in dimension {dim}"
            )
        if name not in self._sources:
            file, stored = self._stored[name]
            return self._converted(self._counted(name, file.read_slice(stored, dim, start, end)))
        weight = self._stored_weight(name)
        if isinstance(weight, Tensor):
            return self._converted(weight.narrow(dim, start, end - start).clone())
        return self._converted(weight.columns(start, end) if dim else weight.rows(start, end))

    def read_expert(self, name: str, index: int) -> Tensor | QuantizedWeight:
        """The matrix [outputs, inputs] of one expert, of a weight [E, inputs, outputs]; see `read_weight`."""
        source = self._sources.get(name)
        if source is None:
            return self._converted(self._read_rows(name, index, index + 1)[0].t().contiguous())
        if not isinstance(source, ExpertsSource):
            raise CheckpointError(f"{name} is stored in a format that has no experts one by one")
        with self._lock:
            self._unread.pop(name, None)
        return self._converted(
            source.read_expert(
                index, lambda part, first, end: self._read_rows(self._name_of(part), first, end)
            )
        )

    def unread(self) -> list[str]:
        """Names of the tensors that have not been read."""
        return list(self._unread)

    def finish(self) -> None:
        """Report that reading is over, even if tensors were left unread."""
        self._done = self.num_bytes
        self._progress("weights", self.num_bytes, self.num_bytes)

    def _stored_weight(self, name: str) -> Tensor | QuantizedWeight:
        source = self._sources.get(name)
        if source is None:
            return self._read_part(name)
        with self._lock:
            self._unread.pop(name, None)
        return source.read(lambda part: self._read_part(self._name_of(part)))

    def _read_part(self, name: str) -> Tensor:
        file, stored = self._find(name)
        return self._counted(name, file.read(stored))

    def _read_rows(self, name: str, first: int, end: int) -> Tensor:
        file, stored = self._find(name)
        return self._counted(name, file.read_slice(stored, 0, first, end))

    def _find(self, name: str) -> tuple[WeightFile, StoredTensor]:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"the checkpoint lacks {name}")
        return stored

    def _counted(self, name: str, tensor: Tensor) -> Tensor:
        with self._lock:
            self._unread.pop(name, None)
            # A tensor may be read twice, for two uses; it counts once.
            self._done = min(self.num_bytes, self._done + tensor.nbytes)
            self._progress("weights", self._done, self.num_bytes)
        return tensor

    @overload
    def _converted(self, weight: Tensor) -> Tensor: ...
    @overload
    def _converted(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight: ...
    def _converted(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        if isinstance(weight, Tensor):
            dtype = self._dtype if weight.is_floating_point() else None
            return weight.to(device=self._device, dtype=dtype)
        return weight.to(device=self._device, dtype=self._dtype)


def _opened(paths: Sequence[Path]) -> tuple[Sequence[WeightFile], Mapping[str, WeightSource]]:
    """The files of a folder, which are of one format, and the weights that they say they have."""
    if paths and paths[0].suffix == ".gguf":
        return open_gguf(paths)
    return [SafetensorsFile(path) for path in paths], {}


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
