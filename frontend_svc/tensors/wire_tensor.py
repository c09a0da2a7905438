"""A tensor of a request, with its bytes held once for all outputs and attempts that it is sent for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.common.v1 import tensor_pb2

ITEM_SIZES = {
    tensor_pb2.D_TYPE_FP32: 4,
    tensor_pb2.D_TYPE_FP16: 2,
    tensor_pb2.D_TYPE_BF16: 2,
    tensor_pb2.D_TYPE_FP8: 1,
    tensor_pb2.D_TYPE_INT64: 8,
    tensor_pb2.D_TYPE_INT32: 4,
    tensor_pb2.D_TYPE_UINT8: 1,
    tensor_pb2.D_TYPE_INT8: 1,
    tensor_pb2.D_TYPE_BOOL: 1,
}


def num_bytes(dtype: tensor_pb2.DType, shape: Sequence[int]) -> int:
    """Size in bytes of a tensor of a known dtype."""
    return math.prod(shape) * ITEM_SIZES[dtype]


@dataclass(frozen=True, slots=True, eq=False)
class WireTensor:
    """`reference` refers to the bytes by their digest: ADDs contain it until their engine is known."""

    reference: tensor_pb2.Tensor
    data: bytes

    @property
    def digest(self) -> str:
        """The SHA-256 of the bytes, lower-case hex."""
        return self.reference.blob.sha256

    @classmethod
    def of(cls, dtype: tensor_pb2.DType, shape: Sequence[int], data: bytes) -> WireTensor:
        """Hash the bytes, which takes about a millisecond per megabyte. Thread-safe."""
        blob = tensor_pb2.BlobReference(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
        return cls(tensor_pb2.Tensor(dtype=dtype, shape=shape, blob=blob), data)
