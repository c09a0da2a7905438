"""Checks a serialized message for what protobuf's runtime hides or pays for. Knows no message type.

A parser cuts a number down to its field's 32 bits, and of a field that is set twice it keeps the last in
silence. And two bytes on the wire can become an object of 200: a message within its size limit could take a
hundred times as much memory, and seconds to parse. The rules come from descriptors.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}
_WIRE_TYPE_BITS = 3
_WIRE_TYPE_MASK = 7
# Deeper than protobuf's parsers go.
_MAX_DEPTH = 128
# A varint has at most 64 bits, 7 in each byte.
_MAX_SHIFT = 63
# Shorter numbers fit all fields.
_LONG_NUMBER = re.compile(rb"[\x80-\xff]{4,}[\x00-\x7f]")
_CONTINUED = bytes(range(0x80, 0x100))
_U32, _U64 = (0, 2**32 - 1), (0, 2**64 - 1)
_I32, _I64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)
# What a varint of each type may be, as it stands on the wire.
_RANGES = {
    FieldDescriptor.TYPE_UINT32: _U32,
    FieldDescriptor.TYPE_SINT32: _U32,
    FieldDescriptor.TYPE_INT32: _I32,
    FieldDescriptor.TYPE_ENUM: _I32,
    FieldDescriptor.TYPE_INT64: _I64,
    FieldDescriptor.TYPE_UINT64: _U64,
    FieldDescriptor.TYPE_SINT64: _U64,
    FieldDescriptor.TYPE_BOOL: _U64,
}
_WIRE_TYPES = {
    **dict.fromkeys(_RANGES, _VARINT),
    **dict.fromkeys(
        (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), _FIXED64
    ),
    **dict.fromkeys(
        (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), _FIXED32
    ),
}


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """max_fields: nested ones included; packed numbers are one.  max_numbers: packed ones."""

    max_fields: int
    max_numbers: int


class WireError(ValueError):
    """A message that must be refused. `violations` are pairs of a field and what is wrong with it."""

    def __init__(self, message: str, reason: str, fields: tuple[str, ...]) -> None:
        super().__init__(message)
        self.reason = reason
        self.violations = [(field, message) for field in fields]


@dataclass(frozen=True, slots=True)
class _Field:
    """`slot`: the field, or the oneof, that may be set once; None for a repeated field."""

    name: str
    slot: str | None
    wire_type: int
    range: tuple[int, int] | None
    message: Descriptor | None


# Names from the outermost field to the innermost, with the index of a repeated one.
_Path: TypeAlias = "tuple[tuple[str, int | None], ...]"


def check_wire(data: bytes, descriptor: Descriptor, limits: MessageLimits) -> None:
    """Raise WireError for a message of type `descriptor` that has too many fields or packed numbers, a number
    beyond its field's range, or a field or oneof that is set twice.

    Malformed data is left to its parser.
    """
    try:
        _Walk(data, limits).check(0, len(data), descriptor, ())
    except IndexError:
        return


class _Walk:
    def __init__(self, data: bytes, limits: MessageLimits) -> None:
        self._data = data
        self._limits = limits
        self._num_fields = 0
        self._num_numbers = 0

    def check(self, offset: int, end: int, descriptor: Descriptor, path: _Path) -> None:
        """Check the message at `offset`. Raises IndexError for malformed data."""
        if len(path) > _MAX_DEPTH:
            raise IndexError("too deep for a parser")
        data, fields = self._data, _fields_of(descriptor)
        members: dict[str, str] = {}
        counts: dict[str, int] = {}
        while offset < end:
            tag, offset = _read_varint(data, offset)
            wire_type = tag & _WIRE_TYPE_MASK
            field = fields.get(tag >> _WIRE_TYPE_BITS)
            index = None
            if field is not None and field.slot is None:
                index = counts[field.name] = counts.get(field.name, -1) + 1
            name = str(tag >> _WIRE_TYPE_BITS) if field is None else field.name
            self._num_fields += 1
            if self._num_fields > self._limits.max_fields:
                raise _too_many(
                    (*path, (name, index)), self._limits.max_fields, "fields, nested ones included"
                )
            start = offset
            if wire_type == _VARINT:
                value, offset = _read_varint(data, offset)
                if field is not None and field.range is not None:
                    _check_range(value, field.range, (*path, (name, index)))
            elif wire_type in _SIZES:
                offset += _SIZES[wire_type]
            elif wire_type == _BYTES:
                size, start = _read_varint(data, offset)
                offset = start + size
            else:
                raise WireError(
                    f"field {_exact((*path, (name, None)))} is a group, which no message has here",
                    "INVALID_REQUEST",
                    (_container((*path, (name, None))),),
                )
            if offset > end:
                raise IndexError("truncated")
            if field is None:
                continue
            if wire_type == _BYTES and field.message is not None:
                self.check(start, offset, field.message, (*path, (name, index)))
            elif wire_type == _BYTES and field.slot is None and field.wire_type != _BYTES:
                self._check_packed(start, offset, field, path)
            if field.slot is not None and wire_type == field.wire_type:
                if field.slot in members:
                    raise _set_twice(path, field, members[field.slot])
                members[field.slot] = name

    def _check_packed(self, start: int, end: int, field: _Field, path: _Path) -> None:
        size = _SIZES.get(field.wire_type)
        packed = self._data[start:end]
        self._num_numbers += len(packed) // size if size else len(packed.translate(None, _CONTINUED))
        if self._num_numbers > self._limits.max_numbers:
            raise _too_many((*path, (field.name, 0)), self._limits.max_numbers, "packed numbers")
        if field.range is None:
            return
        for number in _LONG_NUMBER.finditer(packed):
            value, _ = _read_varint(packed, number.start())
            index = len(packed[: number.start()].translate(None, _CONTINUED))
            _check_range(value, field.range, (*path, (field.name, index)))


@functools.cache
def _fields_of(descriptor: Descriptor) -> dict[int, _Field]:
    return {number: _field(field) for number, field in descriptor.fields_by_number.items()}


def _field(field: FieldDescriptor) -> _Field:
    oneof = field.containing_oneof
    # An optional field has a oneof of its own, which only its name tells from others.
    is_choice = oneof is not None and oneof.name != f"_{field.name}"
    slot = oneof.name if oneof is not None and is_choice else field.name
    return _Field(
        field.name,
        None if field.is_repeated else slot,
        _WIRE_TYPES.get(field.type, _BYTES),
        _RANGES.get(field.type),
        field.message_type if field.type == FieldDescriptor.TYPE_MESSAGE else None,
    )


def _check_range(value: int, allowed: tuple[int, int], path: _Path) -> None:
    minimum, maximum = allowed
    if minimum < 0 and _I64[1] < value <= _U64[1]:
        value -= 2**64
    if not minimum <= value <= maximum:
        message = f"{_exact(path)} is {value}, it takes {minimum} to {maximum}"
        raise WireError(message, "INVALID_REQUEST", _fields_named(path))


def _set_twice(path: _Path, field: _Field, earlier: str) -> WireError:
    assert field.slot is not None, "a repeated field may be given any number of times"
    path = (*path, (field.slot, None))
    values = f", by {earlier} and by {field.name}" if field.slot != field.name else ""
    return WireError(
        f"{_exact(path)} is set twice{values}; it takes one", "INVALID_REQUEST", _fields_named(path)
    )


def _too_many(path: _Path, limit: int, what: str) -> WireError:
    field = _container(path)
    return WireError(f"the request has more than {limit} {what}, at {field}", "TOO_MANY_FIELDS", (field,))


def _fields_named(path: _Path) -> tuple[str, ...]:
    """The outermost repeated field, for clients that show errors next to a field, and the field itself."""
    return tuple(dict.fromkeys((_container(path), _exact(path))))


def _exact(path: _Path) -> str:
    return ".".join(name if index is None else f"{name}[{index}]" for name, index in path)


def _container(path: _Path) -> str:
    names = []
    for name, index in path:
        names.append(name)
        if index is not None:
            break
    return ".".join(names)


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """The number at `offset` and the offset after it. Raises IndexError if it is truncated or too long."""
    byte = data[offset]
    offset += 1
    if byte < 0x80:
        return byte, offset
    value, shift = byte & 0x7F, 7
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
        if shift > _MAX_SHIFT:
            raise IndexError("a number of more than 64 bits")
