"""The binary form of a dataclass, derived from the types of its fields. Knows no feature and no channel."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from engine_svc.core.byte_fields import FieldReader, FieldWriter

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


def form_of(kind: type[T]) -> BinaryForm[T]:
    """The form of a dataclass. Raises TypeError for a field of a type that has none.

    Fields may be int of 64 bits, float, bool, str, bytes, enums of texts, dataclasses, each of these or None,
    and tuples, lists and frozensets of them.
    """
    return _record(kind)


def _form_of(kind: Any) -> BinaryForm[Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _CODES:
        return _product([kind], lambda value: (value,), lambda value: value)
    if kind is str:
        return BinaryForm(FieldWriter.text, FieldReader.text)
    if kind is bytes:
        return BinaryForm(FieldWriter.raw, FieldReader.raw)
    if is_dataclass(kind):
        return _record(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return BinaryForm(
            lambda writer, member: writer.text(member.value), lambda reader: kind(reader.text())
        )
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _product(arguments, tuple, lambda *values: values)
    if origin in (tuple, list, frozenset):
        return _sequence(origin, arguments[0])
    if len(arguments) == 2 and arguments[1] is NoneType:
        return _optional(_form_of(arguments[0]))
    raise TypeError(f"{kind} has no binary form")


def _record(kind: Any) -> BinaryForm[Any]:
    names = [field.name for field in fields(kind)]
    hints = get_type_hints(kind)
    return _product(
        [hints[name] for name in names], lambda record: [getattr(record, name) for name in names], kind
    )


def _product(
    kinds: Sequence[Any], split: Callable[[Any], Sequence[Any]], make: Callable[..., Any]
) -> BinaryForm[Any]:
    """The form of values of these types, one after the other. `make` is the inverse of `split`."""
    if all(kind in _CODES for kind in kinds):
        layout = struct.Struct("<" + "".join(_CODES[kind] for kind in kinds))
        return BinaryForm(
            lambda writer, whole: writer.fixed(layout, *split(whole)),
            lambda reader: make(*reader.fixed(layout)),
        )
    forms = [_form_of(kind) for kind in kinds]

    def write(writer: FieldWriter, whole: Any) -> None:
        for form, value in zip(forms, split(whole), strict=True):
            form.write(writer, value)

    return BinaryForm(write, lambda reader: make(*[form.read(reader) for form in forms]))


def _sequence(make: Callable[[Any], Any], kind: Any) -> BinaryForm[Any]:
    if kind in _CODES:
        code = _CODES[kind]
        return BinaryForm(
            lambda writer, values: writer.numbers(code, values), lambda reader: make(reader.numbers(code))
        )
    form = _form_of(kind)

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
