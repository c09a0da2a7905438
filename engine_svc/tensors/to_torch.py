"""Converts a tensor's bytes to torch. Knows no wire."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_svc.tensors.host_tensor import HostTensor

_DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn, "int64": torch.int64, "int32": torch.int32,
    "uint8": torch.uint8, "int8": torch.int8, "bool": torch.bool,
}  # fmt: skip


def torch_dtype(name: str) -> torch.dtype:
    """The type of this name, which must be one of a HostTensor's."""
    return _DTYPES[name]


def to_torch(tensor: HostTensor) -> Tensor:
    """A tensor with its own memory, on the host: writing it does not change the message."""
    dtype = _DTYPES[tensor.dtype]
    if not tensor.data:
        return torch.empty(tensor.shape, dtype=dtype)
    # A bytearray copies the bytes and is writable.
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)
