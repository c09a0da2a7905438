"""A dense array as bytes in the host's memory, checked against its type and shape. Knows no wire."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# By the names that torch has for them.
ITEM_SIZES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1,
    "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip
_MAX_DIMENSIONS = 8
# The largest number of float16, and the bits of the largest bfloat16 below it.
MAX_MODERATE = 65_504.0
_MAX_MODERATE_BF16 = 0x477F


class BadTensor(ValueError):
    """Type, shape and bytes do not belong together. The message says what is wrong, without the bytes."""


# Compared and kept by identity: what it weighs is given back when the last holder lets go of it.
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HostTensor:
    """Row-major, little-endian, without padding. Never written."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        """Raises BadTensor."""
        expected = size_bytes(self.dtype, self.shape)
        if len(self.data) != expected:
            raise BadTensor(f"{list(self.shape)} of {self.dtype} is {expected} bytes, {len(self.data)} came")

    @property
    def is_moderate(self) -> bool:
        """Whether no element of a floating type is beyond what float16 can hold, so that sums stay finite."""
        match self.dtype:
            case "float32":
                return bool((np.abs(np.frombuffer(self.data, "<f4")) <= MAX_MODERATE).all())
            case "bfloat16":
                return bool((np.frombuffer(self.data, "<u2") & 0x7FFF <= _MAX_MODERATE_BF16).all())
        return True

    @property
    def is_sound(self) -> bool:
        """Whether all of its elements are numbers: finite where the type has others, 0 or 1 of bool."""
        match self.dtype:
            case "float32" | "float16":
                kind = "<f4" if self.dtype == "float32" else "<f2"
                return bool(np.isfinite(np.frombuffer(self.data, kind)).all())
            case "bfloat16":
                # All bits of the exponent: infinity or NaN.
                return not bool((np.frombuffer(self.data, "<u2") & 0x7F80 == 0x7F80).any())
            case "float8_e4m3fn":
                # It has no infinity, and one NaN of either sign.
                return not bool((np.frombuffer(self.data, "u1") & 0x7F == 0x7F).any())
            case "bool":
                return bool((np.frombuffer(self.data, "u1") <= 1).all())
        return True


def size_bytes(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of an array. BadTensor where there is no such type, or too many dimensions."""
    if dtype not in ITEM_SIZES:
        raise BadTensor(f"dtype is {dtype}, it takes one of {', '.join(ITEM_SIZES)}")
    if len(shape) > _MAX_DIMENSIONS:
        raise BadTensor(f"shape has {len(shape)} dimensions, it takes at most {_MAX_DIMENSIONS}")
    return math.prod(shape) * ITEM_SIZES[dtype]
