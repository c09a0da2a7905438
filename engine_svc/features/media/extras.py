"""The items of a request, what a step encodes of them, and the key of content in the blocks of a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from engine_svc.core.content import Content
from engine_svc.core.extras import Extra
from engine_svc.tensors.host_tensor import HostTensor

KEY_PREFIX = "media:"  # of a span's key; the digest of the item's content follows


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One input of the encoder, by its name in EncoderSpec."""

    name: str
    value: HostTensor


@dataclass(frozen=True, slots=True)
class MediaContent(Content):
    """The encoder's inputs for one item. sha256: of them, see `digest_of`."""

    sha256: str
    inputs: tuple[EncoderInput, ...]

    @property
    def digest(self) -> str:
        return self.sha256

    @property
    def size_bytes(self) -> int:
        return sum(len(each.value.data) for each in self.inputs)


@dataclass(frozen=True, slots=True)
class PromptItem:
    """An item in a prompt: the content of `num_tokens` positions from `start` on.

    tokens: offsets of positions in it that have a token and no embedding.
    """

    content: MediaContent
    start: int
    num_tokens: int
    tokens: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        return KEY_PREFIX + self.content.sha256


@dataclass(frozen=True, slots=True)
class MediaItems(Extra):
    """All items of a request, in order."""

    items: tuple[PromptItem, ...]


@dataclass(frozen=True, slots=True)
class RowItems:
    """Items of one request, by their indices in its prompt."""

    request_id: str
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncoderWork(Extra):
    """Of a plan. evicted: keys of outputs to drop, before the items of `rows` are encoded."""

    rows: tuple[RowItems, ...]
    evicted: tuple[str, ...]


EXTRAS = (MediaItems, EncoderWork)


def digest_of(inputs: Iterable[EncoderInput]) -> str:
    """A frontend's name for content: SHA-256 over type, shape and bytes of each input, in order of names."""
    digest = hashlib.sha256()
    for each in sorted(inputs, key=lambda one: one.name):
        shape = ",".join(map(str, each.value.shape))
        digest.update(f"{each.name}:{each.value.dtype}:{shape};".encode())
        digest.update(each.value.data)
    return digest.hexdigest()
