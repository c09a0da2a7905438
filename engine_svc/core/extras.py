"""What optional features attach to the core's data, each under its own type. The core passes it on unread."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self

from engine_svc.core.byte_fields import FieldReader, FieldWriter, MessageError

_COUNT = struct.Struct("<I")

# By type: at most one of each. The value's class is the key.
Extras = dict[type, Any]


class Extra(Protocol):
    """A value with a fixed binary form, in which it reaches the ranks of a divided model and comes back.

    One that may exclude tokens has `rules`: what clients call what it excludes them by.
    """

    def encode(self) -> bytes: ...

    @classmethod
    def decode(cls, data: bytes) -> Self: ...


class PreparedExtra(Extra, Protocol):
    """An extra that every rank that samples prepares before its request may be admitted.

    blocker: the name that blocks the request until then; "" if this one needs no preparation.
    """

    @property
    def blocker(self) -> str: ...


class OutputExtra(Protocol):
    """An extra that goes to the client with the request's output. One that a rank makes is an Extra too."""

    @property
    def size_bytes(self) -> int:
        """An upper limit of its size on the wire."""
        ...

    def merged(self, later: Self) -> Self:
        """This and what a later step adds; changes neither."""
        ...

    def split(self, max_bytes: int) -> Sequence[Self]:
        """The same in parts of at most `max_bytes`, as far as it can be divided."""
        ...


def blocker_of(extra: object) -> str:
    """The name that blocks a request with this extra until it is prepared; "" if it need not be."""
    return getattr(extra, "blocker", "")


def rules_of(extra: object) -> tuple[str, ...]:
    """What clients call the rules of this extra that may exclude tokens."""
    return getattr(extra, "rules", ())


def merge_extras(earlier: Extras, later: Extras) -> Extras:
    """The extras of one request from two steps, as if one step had produced them."""
    merged = dict(earlier)
    for kind, extra in later.items():
        merged[kind] = merged[kind].merged(extra) if kind in merged else extra
    return merged


class UnknownExtra(TypeError):
    """An extra whose type is not registered for the ranks: a bug."""


class ExtraCodec:
    """Writes and reads extras by the index of their type. Both sides have the same types in one order."""

    def __init__(self, kinds: Sequence[type[Extra]]) -> None:
        self._kinds = tuple(kinds)
        self._tag_of: dict[type, int] = {kind: tag for tag, kind in enumerate(kinds)}

    def check(self, kinds: Iterable[type]) -> None:
        """Raise UnknownExtra for a type that no rank can read."""
        for kind in kinds:
            if kind not in self._tag_of:
                raise UnknownExtra(f"an extra {kind.__name__} is not registered, so no rank can read it")

    def write(self, writer: FieldWriter, extras: Extras) -> None:
        writer.fixed(_COUNT, len(extras))
        for kind, extra in extras.items():
            writer.fixed(_COUNT, self._tag_of[kind])
            writer.raw(extra.encode())

    def read(self, reader: FieldReader) -> Extras:
        (count,) = reader.fixed(_COUNT)
        return {kind: kind.decode(reader.raw()) for kind in (self._read_kind(reader) for _ in range(count))}

    def write_rows(self, writer: FieldWriter, extras: dict[type, dict[int, Any]]) -> None:
        """Write the extras of a result, by type and row."""
        writer.fixed(_COUNT, len(extras))
        for kind, rows in extras.items():
            writer.fixed(_COUNT, self._tag_of[kind])
            writer.counted_ints(list(rows))
            for extra in rows.values():
                writer.raw(extra.encode())

    def read_rows(self, reader: FieldReader) -> dict[type, dict[int, Any]]:
        (count,) = reader.fixed(_COUNT)
        extras: dict[type, dict[int, Any]] = {}
        for _ in range(count):
            kind = self._read_kind(reader)
            extras[kind] = {row: kind.decode(reader.raw()) for row in reader.counted_ints()}
        return extras

    def _read_kind(self, reader: FieldReader) -> type[Extra]:
        (tag,) = reader.fixed(_COUNT)
        if tag >= len(self._kinds):
            raise MessageError(f"a message has extra {tag}, this rank knows {len(self._kinds)}")
        return self._kinds[tag]


NO_EXTRAS = ExtraCodec(())
