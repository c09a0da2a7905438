"""What the feature adds to results."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class NanCount:
    """How many logits of a row were NaN or positive infinity; an output extra."""

    count: int
    size_bytes: ClassVar[int] = 16
    stays_with_error: ClassVar[bool] = True

    def merged(self, later: NanCount) -> NanCount:
        return NanCount(self.count + later.count)

    def split(self, max_bytes: int) -> list[NanCount]:
        return [self]

    def encode(self) -> bytes:
        return _COUNT.pack(self.count)

    @classmethod
    def decode(cls, data: bytes) -> NanCount:
        return cls(*_COUNT.unpack(data))


EXTRAS = (NanCount,)
