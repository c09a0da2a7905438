"""What the feature attaches to requests and results."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_AMOUNTS = struct.Struct("<3d")


@dataclass(frozen=True, slots=True)
class Penalties:
    """presence: subtracted once for each token of the output.  frequency: for each occurrence of it there.
    repetition: for tokens of prompt or output; divides logits above 0, multiplies the rest.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0

    def encode(self) -> bytes:
        return _AMOUNTS.pack(self.presence, self.frequency, self.repetition)

    @classmethod
    def decode(cls, data: bytes) -> Penalties:
        return cls(*_AMOUNTS.unpack(data))


EXTRAS = (Penalties,)
