"""What a step encodes, and the key of content in the blocks of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.core.extras import Extra

KEY_PREFIX = "media:"  # of a span's key; the digest of the item's content follows


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


EXTRAS = (EncoderWork,)
