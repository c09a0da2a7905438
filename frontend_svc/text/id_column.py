"""Token ids as they travel in an ADD. Knows no message."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence


def id_column(token_ids: Sequence[int]) -> bytes:
    """The ids as little-endian u32."""
    column = array("I", token_ids)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()
