"""Columns of the wire: packed little-endian numbers. Knows no message."""

from __future__ import annotations

import sys
from array import array


def pack(values: array[int] | array[float]) -> bytes:
    """The bytes of a column; `values` is not to be used any more."""
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
