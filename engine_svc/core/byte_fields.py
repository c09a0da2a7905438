"""Writes and reads the fields of a message one after the other. Knows no plan and no result."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_LENGTH = struct.Struct("<I")
_INT32 = np.dtype("<i4")


class MessageError(ValueError):
    """Bytes that are no message of this version: the two sides do not run the same code."""


class FieldWriter:
    """Collects the fields of one message. Fields of variable length are preceded by their count."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def fixed(self, layout: struct.Struct, *values: float) -> None:
        self._parts.append(layout.pack(*values))

    def ints(self, values: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """32-bit numbers without a count, which the reader must know."""
        self._parts.append(np.asarray(values, dtype=_INT32).tobytes())

    def counted_ints(self, values: Sequence[int]) -> None:
        self._parts.append(_LENGTH.pack(len(values)))
        self.ints(values)

    def numbers(self, code: str, values: Collection[float]) -> None:
        """Numbers of the format `code` of `struct`, with their count."""
        self._parts.append(struct.pack(f"<I{len(values)}{code}", len(values), *values))

    def raw(self, data: bytes) -> None:
        self._parts.append(_LENGTH.pack(len(data)))
        self._parts.append(data)

    def text(self, text: str) -> None:
        self.raw(text.encode("utf-8", "surrogatepass"))

    def message(self) -> bytes:
        return b"".join(self._parts)


class FieldReader:
    """Reads the fields of one message. Raises MessageError if its length is not the expected one."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._offset = 0

    def fixed(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack_from(self._message, self._take(layout.size))

    def ints(self, count: int) -> npt.NDArray[np.int32]:
        return np.frombuffer(self._message, _INT32, count, self._take(4 * count))

    def counted_ints(self) -> list[int]:
        values: list[int] = self.ints(self._length()).tolist()
        return values

    def numbers(self, code: str) -> tuple[Any, ...]:
        layout = f"<{self._length()}{code}"
        return struct.unpack_from(layout, self._message, self._take(struct.calcsize(layout)))

    def raw(self) -> bytes:
        count = self._length()
        start = self._take(count)
        return self._message[start : start + count]

    def text(self) -> str:
        return self.raw().decode("utf-8", "surrogatepass")

    def finish(self) -> None:
        """Raise MessageError if any bytes are left."""
        if self._offset != len(self._message):
            raise MessageError(f"a message has {len(self._message)} bytes, {self._offset} were expected")

    def _length(self) -> int:
        count: int = self.fixed(_LENGTH)[0]
        return count

    def _take(self, count: int) -> int:
        start = self._offset
        if start + count > len(self._message):
            raise MessageError(
                f"a message has {len(self._message)} bytes, at least {start + count} were expected"
            )
        self._offset = start + count
        return start
