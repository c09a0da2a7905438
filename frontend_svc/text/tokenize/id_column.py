"""The wire format of token ids: little-endian u32. Knows no message."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

ID_BYTES = 4


def id_column(token_ids: Sequence[int]) -> bytes:
    """Pack ids as little-endian u32."""
    column = array("I", token_ids)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def ids_of(column: bytes) -> list[int]:
    """Inverse of `id_column`. Raises ValueError for a length that is no multiple of 4."""
    token_ids = array("I", column)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()
