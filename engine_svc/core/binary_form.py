"""The binary form of a dataclass, derived from the types of its fields. Knows no feature and no channel."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from engine_svc.core.byte_fields import FieldReader, FieldWriter
from engine_svc.core.content import Content, ContentTable

_CODES = {int: "q", float: "d", bool: "?"}
_COUNT = struct.Struct("<I")
_IS_SET = struct.Struct("<?")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BinaryForm(Generic[T]):
    """Writes and reads the values of one type. Reading raises ValueError for bytes that are no such value."""

    write: Callable[[FieldWriter, T], None]
    read: Callable[[FieldReader], T]

    def encode(self, value: T) -> bytes:
        writer = FieldWriter()
        self.write(writer, value)
        return writer.message()

    def decode(self, data: bytes) -> T:
        reader = FieldReader(data)
        value = self.read(reader)
        reader.finish()
        return value


@dataclass(frozen=True, slots=True)
class SharedContents:
    """The contents that a reader has, as the writer of its messages knows them, and as it has them itself.

    An end of a channel either writes or reads.
    """

    sent: ContentTable[bool] = field(default_factory=ContentTable)
    received: ContentTable[Content] = field(default_factory=ContentTable)


def form_of(kind: type[T], contents: SharedContents | None = None) -> BinaryForm[T]:
    """The form of a dataclass. Raises TypeError for a field of a type that has none.

    Fields may be int of 64 bits, float, bool, str, bytes, enums of texts, dataclasses, each of these or None,
    and tuples, lists and frozensets of them.
    contents: of the channel, for fields that are a Content; None: these are written whole each time.
    """
    return _record(kind, contents)


def _form_of(kind: Any, contents: SharedContents | None) -> BinaryForm[Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _CODES:
        return _product([kind], contents, lambda value: (value,), lambda value: value)
    if kind is str:
        return BinaryForm(FieldWriter.text, FieldReader.text)
    if kind is bytes:
        return BinaryForm(FieldWriter.raw, FieldReader.raw)
    if is_dataclass(kind):
        form = _record(kind, contents)
        is_content = contents is not None and isinstance(kind, type) and issubclass(kind, Content)
        return _written_once(form, contents) if contents is not None and is_content else form
    if isinstance(kind, type) and issubclass(kind, Enum):
        return BinaryForm(
            lambda writer, member: writer.text(member.value), lambda reader: kind(reader.text())
        )
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _product(arguments, contents, tuple, lambda *values: values)
    if origin in (tuple, list, frozenset):
        return _sequence(origin, arguments[0], contents)
    if len(arguments) == 2 and arguments[1] is NoneType:
        return _optional(_form_of(arguments[0], contents))
    raise TypeError(f"{kind} has no binary form")


def _record(kind: Any, contents: SharedContents | None) -> BinaryForm[Any]:
    names = [each.name for each in fields(kind)]
    hints = get_type_hints(kind)
    return _product(
        [hints[name] for name in names],
        contents,
        lambda record: [getattr(record, name) for name in names],
        kind,
    )


def _written_once(form: BinaryForm[Any], contents: SharedContents) -> BinaryForm[Any]:
    """The form of a content: its digest, and the whole where the reader does not have it."""
    sent, received = contents.sent, contents.received

    def write(writer: FieldWriter, content: Content) -> None:
        digest = content.digest
        is_there = sent.use(digest) is not None
        writer.text(digest)
        writer.fixed(_IS_SET, is_there)
        if not is_there:
            form.write(writer, content)
            sent.add(digest, content.size_bytes, True)

    def read(reader: FieldReader) -> Content:
        digest = reader.text()
        if reader.fixed(_IS_SET)[0]:
            known = received.use(digest)
            if known is None:
                raise ValueError(f"content {digest} is not here")
            return known
        content: Content = form.read(reader)
        received.add(digest, content.size_bytes, content)
        return content

    return BinaryForm(write, read)


def _product(
    kinds: Sequence[Any],
    contents: SharedContents | None,
    split: Callable[[Any], Sequence[Any]],
    make: Callable[..., Any],
) -> BinaryForm[Any]:
    """The form of values of these types, one after the other. `make` is the inverse of `split`."""
    if all(kind in _CODES for kind in kinds):
        layout = struct.Struct("<" + "".join(_CODES[kind] for kind in kinds))
        return BinaryForm(
            lambda writer, whole: writer.fixed(layout, *split(whole)),
            lambda reader: make(*reader.fixed(layout)),
        )
    forms = [_form_of(kind, contents) for kind in kinds]

    def write(writer: FieldWriter, whole: Any) -> None:
        for form, value in zip(forms, split(whole), strict=True):
            form.write(writer, value)

    return BinaryForm(write, lambda reader: make(*[form.read(reader) for form in forms]))


def _sequence(make: Callable[[Any], Any], kind: Any, contents: SharedContents | None) -> BinaryForm[Any]:
    if kind in _CODES:
        code = _CODES[kind]
        return BinaryForm(
            lambda writer, values: writer.numbers(code, values), lambda reader: make(reader.numbers(code))
        )
    form = _form_of(kind, contents)

    def write(writer: FieldWriter, values: Any) -> None:
        writer.fixed(_COUNT, len(values))
        for value in values:
            form.write(writer, value)

    def read(reader: FieldReader) -> Any:
        (count,) = reader.fixed(_COUNT)
        return make([form.read(reader) for _ in range(count)])

    return BinaryForm(write, read)


def _optional(form: BinaryForm[Any]) -> BinaryForm[Any]:
    def write(writer: FieldWriter, value: Any) -> None:
        writer.fixed(_IS_SET, value is not None)
        if value is not None:
            form.write(writer, value)

    return BinaryForm(write, lambda reader: form.read(reader) if reader.fixed(_IS_SET)[0] else None)
