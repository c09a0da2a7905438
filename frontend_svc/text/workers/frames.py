"""Messages between a frontend and its text workers: a JSON header and raw bytes, both with their lengths.

Never pickled: a worker compromised by a tokenizer or a template can send wrong data, but cannot make the
frontend run code. Knows no pipes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from frontend_svc.text.tokenize.id_column import ids_of

MAX_HEADER_BYTES = 1024 * 1024
# Two files of the largest size that an engine may send.
MAX_BODY_BYTES = 512 * 1024 * 1024

_PREFIX = struct.Struct("<II")


class FrameError(ValueError):
    """Received data is not a frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    header: Mapping[str, object]
    body: bytes

    def text(self, name: str) -> str:
        """The string `name` of the header. Raises FrameError."""
        value = self.header.get(name)
        if not isinstance(value, str):
            raise FrameError(f"the header's {name} is not a string")
        return value

    def number(self, name: str) -> float:
        """The number `name` of the header. Raises FrameError."""
        value = self.header.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise FrameError(f"the header's {name} is not a number")
        return value

    def numbers(self, name: str) -> list[int]:
        """The whole numbers `name` of the header. Raises FrameError."""
        value = self.header.get(name)
        if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
            raise FrameError(f"the header's {name} are not whole numbers")
        return value

    def is_on(self, name: str) -> bool:
        return self.header.get(name) is True

    def split(self, num_bytes: int) -> tuple[bytes, bytes]:
        """The body's first `num_bytes` and the rest. Raises FrameError if it has fewer."""
        if not 0 <= num_bytes <= len(self.body):
            raise FrameError(f"the body has {len(self.body)} bytes, {num_bytes} were announced")
        return self.body[:num_bytes], self.body[num_bytes:]


def pack_head(header: Mapping[str, object], num_body_bytes: int) -> bytes:
    """Lengths and header of a frame with a body of `num_body_bytes`. Raises FrameError above the limits."""
    content = json.dumps(header, separators=(",", ":")).encode()
    _check_sizes(len(content), num_body_bytes)
    return _PREFIX.pack(len(content), num_body_bytes) + content


class FrameReader:
    """Assembles frames from bytes as they arrive."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        self._received += data

    def take(self) -> Frame | None:
        """The next complete frame, or None. Raises FrameError for invalid data."""
        if len(self._received) < _PREFIX.size:
            return None
        num_header, num_body = _PREFIX.unpack_from(self._received)
        _check_sizes(num_header, num_body)
        start = _PREFIX.size + num_header
        end = start + num_body
        if len(self._received) < end:
            return None
        with memoryview(self._received) as view:
            header, body = bytes(view[_PREFIX.size : start]), bytes(view[start:end])
        del self._received[:end]
        try:
            value = json.loads(header)
        except (ValueError, RecursionError) as error:
            raise FrameError("the header is not JSON") from error
        if not isinstance(value, dict):
            raise FrameError("the header is not a JSON object")
        return Frame(value, body)


def unpack_numbers(content: bytes) -> list[int]:
    """The numbers of little-endian u32 bytes, which `id_column` packs. Raises FrameError."""
    try:
        return ids_of(content)
    except ValueError as error:
        raise FrameError(f"{len(content)} bytes are not whole numbers") from error


def _check_sizes(num_header: int, num_body: int) -> None:
    if num_header > MAX_HEADER_BYTES or num_body > MAX_BODY_BYTES:
        raise FrameError(f"a frame of {num_header} and {num_body} bytes exceeds the limits")
