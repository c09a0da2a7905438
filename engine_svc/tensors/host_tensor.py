"""A dense array as bytes in host memory, checked against its type and shape. Knows no wire."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Keys are torch's names.
ITEM_SIZES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1,
    "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip
# The largest float16, and the bits of the largest bfloat16 below it.
MAX_MODERATE = 65_504.0
_MAX_MODERATE_BF16 = 0x477F


class BadTensor(ValueError):
    """Type, shape and bytes do not match. The message states the error, without the bytes."""


# Compared by identity: its memory is accounted until its last reference is gone.
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HostTensor:
    """Row-major, little-endian, without padding. Never written."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        expected = size_bytes(self.dtype, self.shape)
        if len(self.data) != expected:
            raise BadTensor(f"{list(self.shape)} of {self.dtype} is {expected} bytes, {len(self.data)} came")

    @property
    def is_moderate(self) -> bool:
        """Whether all elements of a floating type are within float16's range, so that sums stay finite."""
        match self.dtype:
            case "float32":
                return bool((np.abs(np.frombuffer(self.data, "<f4")) <= MAX_MODERATE).all())
            case "bfloat16":
                return bool((np.frombuffer(self.data, "<u2") & 0x7FFF <= _MAX_MODERATE_BF16).all())
        return True

    @property
    def is_sound(self) -> bool:
        """Whether all elements are valid: finite for floating types, 0 or 1 for bool."""
        match self.dtype:
            case "float32" | "float16":
                kind = "<f4" if self.dtype == "float32" else "<f2"
                return bool(np.isfinite(np.frombuffer(self.data, kind)).all())
            case "bfloat16":
                # All bits of the exponent are set: infinity or NaN.
                return not bool((np.frombuffer(self.data, "<u2") & 0x7F80 == 0x7F80).any())
            case "float8_e4m3fn":
                # This type has no infinity, and one NaN of each sign.
                return not bool((np.frombuffer(self.data, "u1") & 0x7F == 0x7F).any())
            case "bool":
                return bool((np.frombuffer(self.data, "u1") <= 1).all())
        return True


def size_bytes(dtype: str, shape: Sequence[int]) -> int:
    """The size of an array. Raises BadTensor for an unknown type."""
    if dtype not in ITEM_SIZES:
        raise BadTensor(f"dtype is {dtype}, it takes one of {', '.join(ITEM_SIZES)}")
    return math.prod(shape) * ITEM_SIZES[dtype]
