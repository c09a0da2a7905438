"""Data that optional features attach to the core's, each under its own type. The core passes it on unread."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from engine_svc.core.binary_form import SharedContents, form_of
from engine_svc.core.byte_fields import FieldReader, FieldWriter, MessageError

_COUNT = struct.Struct("<I")


class Extra:
    """A dataclass that travels with a request, a plan or a result. One in `EXTRAS` reaches the ranks.

    Its binary form is that of its fields, see `form_of`. What is large among them is a Content.
    """

    __slots__ = ()

    stays_with_error: ClassVar[bool] = False  # in the result of a row that ends with an error
    is_slow_at_first: ClassVar[bool] = False  # whether what prepares it is made for the first request with it

    @property
    def blocker(self) -> str:
        """The name that blocks a request until every rank has prepared this; "" for none."""
        return ""

    @property
    def rules(self) -> tuple[str, ...]:
        """Public names of the rules in it that may exclude tokens."""
        return ()


@dataclass(frozen=True, slots=True)
class Parameters(Extra):
    """Sampling parameters that only a stage of the runner reads: numbers by their names in the contract."""

    values: tuple[tuple[str, float], ...]


class OutputExtra(Extra, ABC):
    """An extra that goes to the client with the request's output."""

    __slots__ = ()

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """An upper limit of its size on the wire."""

    @abstractmethod
    def merged(self, later: Self) -> Self:
        """This extra with that of a later step added; changes neither."""

    @abstractmethod
    def split(self, max_bytes: int) -> Sequence[Self]:
        """The same in parts of at most `max_bytes`, as far as it can be divided."""


# By type: at most one of each. In a rank, what was prepared stands in the place of its extra.
Extras = dict[type[Extra], Any]


def merge_extras(earlier: Extras, later: Extras) -> Extras:
    """The extras of one request from two steps, as if one step had produced them."""
    merged = dict(earlier)
    for kind, extra in later.items():
        merged[kind] = merged[kind].merged(extra) if kind in merged else extra
    return merged


class UnknownExtra(TypeError):
    """An extra whose type is not registered for the ranks: a bug."""


class ExtraCodec:
    """Writes and reads extras by the index of their type. Both sides have the same types in one order.

    One for all messages of a channel, in their order, at each end: a Content in them is written whole once.
    """

    def __init__(self, kinds: Sequence[type[Extra]]) -> None:
        self._kinds = tuple(kinds)
        contents = SharedContents()
        self._forms = {kind: form_of(kind, contents) for kind in kinds}
        self._tag_of = {kind: tag for tag, kind in enumerate(kinds)}

    def check(self, kinds: Iterable[type[Extra]]) -> None:
        """Raise UnknownExtra for a type that no rank can read."""
        for kind in kinds:
            if kind not in self._tag_of:
                raise UnknownExtra(f"an extra {kind.__name__} is not registered, so no rank can read it")

    def write(self, writer: FieldWriter, extras: Extras) -> None:
        writer.fixed(_COUNT, len(extras))
        for kind, extra in extras.items():
            writer.fixed(_COUNT, self._tag_of[kind])
            self._forms[kind].write(writer, extra)

    def read(self, reader: FieldReader) -> Extras:
        (count,) = reader.fixed(_COUNT)
        return {
            kind: self._read_extra(kind, reader) for kind in (self._read_kind(reader) for _ in range(count))
        }

    def write_rows(self, writer: FieldWriter, extras: dict[type[Extra], dict[int, Any]]) -> None:
        """Write the extras of a result, by type and row."""
        writer.fixed(_COUNT, len(extras))
        for kind, rows in extras.items():
            writer.fixed(_COUNT, self._tag_of[kind])
            writer.counted_ints(list(rows))
            for extra in rows.values():
                self._forms[kind].write(writer, extra)

    def read_rows(self, reader: FieldReader) -> dict[type[Extra], dict[int, Any]]:
        (count,) = reader.fixed(_COUNT)
        extras: dict[type[Extra], dict[int, Any]] = {}
        for _ in range(count):
            kind = self._read_kind(reader)
            extras[kind] = {row: self._read_extra(kind, reader) for row in reader.counted_ints()}
        return extras

    def _read_kind(self, reader: FieldReader) -> type[Extra]:
        tag: int = reader.fixed(_COUNT)[0]
        if tag >= len(self._kinds):
            raise MessageError(f"a message has extra {tag}, this rank knows {len(self._kinds)}")
        return self._kinds[tag]

    def _read_extra(self, kind: type[Extra], reader: FieldReader) -> Extra:
        try:
            return self._forms[kind].read(reader)
        except ValueError as error:
            raise MessageError(f"a message has a malformed {kind.__name__}: {error}") from error


NO_EXTRAS = ExtraCodec(())
