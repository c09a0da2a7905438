"""The tensors of GGUF files as weights of a model, under the names of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine_svc.model.loading.gguf.blocks import quantized_weight
from engine_svc.model.loading.gguf.config import read_config
from engine_svc.model.loading.gguf.file import FileTensor, GgufHeader, TensorType, forget_model, read_model
from engine_svc.model.loading.gguf.names import How, read_origins
from engine_svc.model.loading.stored_tensor import StoredTensor, read_rows, read_whole, sample_middle
from triptych_kernels import QuantizedWeight, as_tensor, join_rows

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFile:
    """One file. Its tensors are those that weights are made of; quantized ones are rows of bytes.

    Of a tensor with three dimensions each index of the first is a tensor of its own.
    """

    def __init__(self, header: GgufHeader, used: frozenset[str]) -> None:
        self.path = header.path
        self.num_bytes = header.num_bytes
        self.header = header.content
        parts = (part for tensor in header.tensors.values() for part in _parts(tensor))
        self.tensors = {stored.name: stored for stored in parts if stored.name in used}

    def read(self, stored: StoredTensor) -> Tensor:
        """The whole tensor, as stored, in memory of its own."""
        return read_whole(self.path, stored)

    def read_slice(self, stored: StoredTensor, dim: int, start: int, end: int) -> Tensor:
        """Indices start to end - 1 of dimension `dim`, contiguous."""
        if dim == 0:
            return read_rows(self.path, stored, start, end)
        return read_whole(self.path, stored).narrow(dim, start, end - start).clone()

    def sample(self, stored: StoredTensor, num_bytes: int) -> bytes:
        """At most `num_bytes` bytes of the tensor, from its middle on."""
        return sample_middle(self.path, stored, num_bytes)


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A weight that is made of tensors of GGUF files. See WeightSource."""

    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    how: How
    head_dim: int
    kinds: tuple[TensorType, ...]

    def read(self, read: Callable[[str], Tensor]) -> Tensor | QuantizedWeight:
        return _MAKE[self.how](self, read)

    def read_expert(
        self, index: int, read_rows: Callable[[str, int, int], Tensor]
    ) -> Tensor | QuantizedWeight:
        """See ExpertsSource.  Of a weight that is EXPERTS_TURNED."""
        num_experts, _, num_rows = self.shape
        # Of gates, then of ups, where these alternate.
        own = range(index, len(self.tensors), num_experts)
        parts = [
            _weight(self.kinds[part], read_rows(self.tensors[part], 0, num_rows // len(own))) for part in own
        ]
        if len(parts) == 1:
            return parts[0]
        joined = join_rows(parts)
        order = torch.arange(num_rows).view(len(parts), -1).t().flatten()
        return joined.at_rows(order) if isinstance(joined, QuantizedWeight) else as_tensor(joined)[order]


def open_gguf(paths: Sequence[Path]) -> tuple[list[GgufFile], dict[str, GgufSource]]:
    """The files of one model, and its weights by name. Raises CheckpointError."""
    model = read_model(paths)
    origins = read_origins(model, read_config(model))
    used = frozenset(part for origin in origins.values() for part in origin.tensors)
    sources = {
        name: GgufSource(
            origin.shape,
            origin.tensors,
            origin.how,
            origin.head_dim,
            tuple(model.tensors[part.partition("[")[0]].type for part in origin.tensors),
        )
        for name, origin in origins.items()
    }
    # A start reads them no more.
    forget_model()
    return [GgufFile(header, used) for header in model.headers], sources


def _parts(tensor: FileTensor) -> list[StoredTensor]:
    if len(tensor.shape) < 3:
        return [_stored(tensor.name, tensor.type, tensor.shape, tensor.offset)]
    shape = tensor.shape[1:]
    size = tensor.num_bytes // tensor.shape[0]
    return [
        _stored(f"{tensor.name}[{index}]", tensor.type, shape, tensor.offset + index * size)
        for index in range(tensor.shape[0])
    ]


def _stored(name: str, kind: TensorType, shape: tuple[int, ...], offset: int) -> StoredTensor:
    if not kind.is_quantized:
        num_bytes = math.prod(shape) * kind.block_bytes
        return StoredTensor(name, _DTYPES[kind.name], shape, offset, num_bytes)
    rows = (*shape[:-1], shape[-1] // kind.block_size * kind.block_bytes)
    return StoredTensor(name, torch.uint8, rows, offset, math.prod(rows))


def _weight(kind: TensorType, stored: Tensor) -> Tensor | QuantizedWeight:
    if not kind.is_quantized:
        return stored
    if stored.dim() == 1:
        return quantized_weight(kind, stored[None]).dequantize()[0]
    return quantized_weight(kind, stored)


def _as_it_is(source: GgufSource, read: Callable[[str], Tensor]) -> Tensor | QuantizedWeight:
    return _weight(source.kinds[0], read(source.tensors[0]))


def _unpaired(source: GgufSource, read: Callable[[str], Tensor]) -> Tensor | QuantizedWeight:
    # Blocks do not span rows.
    stored = read(source.tensors[0])
    rows = torch.arange(stored.shape[0]).view(-1, source.head_dim // 2, 2).transpose(1, 2).flatten()
    return _weight(source.kinds[0], stored[rows])


def _less_one(source: GgufSource, read: Callable[[str], Tensor]) -> Tensor:
    return as_tensor(_as_it_is(source, read)).float() - 1.0


def _alternated(source: GgufSource, read: Callable[[str], Tensor]) -> Tensor:
    parts = [
        as_tensor(_weight(kind, read(name))) for name, kind in zip(source.tensors, source.kinds, strict=True)
    ]
    return torch.stack(parts, dim=-1).flatten(-2)


def _experts_turned(source: GgufSource, read: Callable[[str], Tensor]) -> Tensor:
    num_experts = source.shape[0]
    num_alternated = len(source.tensors) // num_experts
    # All experts at once: half the memory where nothing is lost.
    is_exact = all(kind.name in ("MXFP4", "BF16") for kind in source.kinds)
    whole = torch.empty(source.shape, dtype=torch.bfloat16 if is_exact else torch.float32)
    for index, (name, kind) in enumerate(zip(source.tensors, source.kinds, strict=True)):
        which, expert = divmod(index, num_experts)
        whole[expert, :, which::num_alternated] = as_tensor(_weight(kind, read(name))).T
    return whole


_MAKE: dict[How, Callable[[GgufSource, Callable[[str], Tensor]], Tensor | QuantizedWeight]] = {
    How.AS_IT_IS: _as_it_is,
    How.UNPAIRED: _unpaired,
    How.LESS_ONE: _less_one,
    How.ALTERNATED: _alternated,
    How.EXPERTS_TURNED: _experts_turned,
}
