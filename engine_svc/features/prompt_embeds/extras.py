"""What the feature attaches to requests and results."""

from __future__ import annotations

import json
from dataclasses import dataclass

from engine_svc.core.byte_fields import FieldReader, FieldWriter
from engine_svc.tensors.host_tensor import HostTensor


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """embeds: [N, hidden].  positions: [N] in the prompt, ascending."""

    embeds: HostTensor
    positions: tuple[int, ...]

    def encode(self) -> bytes:
        writer = FieldWriter()
        writer.text(json.dumps([self.embeds.dtype, self.embeds.shape]))
        writer.raw(self.embeds.data)
        writer.counted_ints(self.positions)
        return writer.message()

    @classmethod
    def decode(cls, data: bytes) -> PromptEmbeds:
        reader = FieldReader(data)
        dtype, shape = json.loads(reader.text())
        embeds = HostTensor(dtype, tuple(shape), reader.raw())
        return cls(embeds, tuple(reader.counted_ints()))


EXTRAS = (PromptEmbeds,)
