"""Counts the fields of a serialized message before it is parsed. Knows no message type.

Two bytes on the wire can become an object of 200: a message within its size limit could take a hundred times
as much memory, and seconds to parse.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIRE_TYPE_BITS = 3
_WIRE_TYPE_MASK = 7
_MAX_DEPTH = 100
# A varint has at most 64 bits, 7 in each byte.
_MAX_SHIFT = 63


def has_more_fields(data: bytes, descriptor: Descriptor, limit: int) -> bool:
    """Whether `data`, a message of type `descriptor`, has more than `limit` fields, nested ones included.

    Packed numbers are one field. False for malformed data, which its parser will refuse.
    """
    try:
        return _count(memoryview(data), descriptor, limit, 0) > limit
    except IndexError:
        return False


def _count(data: memoryview, descriptor: Descriptor, limit: int, depth: int) -> int:
    parts = _message_fields(descriptor)
    offset, end, num_fields = 0, len(data), 0
    while offset < end and num_fields <= limit and depth < _MAX_DEPTH:
        tag, offset = _read_varint(data, offset)
        num_fields += 1
        wire_type = tag & _WIRE_TYPE_MASK
        if wire_type == _VARINT:
            _, offset = _read_varint(data, offset)
        elif wire_type == _FIXED64:
            offset += 8
        elif wire_type == _FIXED32:
            offset += 4
        elif wire_type == _BYTES:
            size, offset = _read_varint(data, offset)
            part = parts.get(tag >> _WIRE_TYPE_BITS)
            if part is not None and size:
                num_fields += _count(data[offset : offset + size], part, limit - num_fields, depth + 1)
            offset += size
        else:
            # The deprecated group encoding, whose fields cannot be counted without their types.
            return num_fields
    return num_fields


def _message_fields(descriptor: Descriptor) -> dict[int, Descriptor]:
    fields = descriptor.fields_by_number.items()
    return {
        number: field.message_type
        for number, field in fields
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None
    }


def _read_varint(data: memoryview, offset: int) -> tuple[int, int]:
    """The number at `offset` and the offset after it. Raises IndexError if it is truncated or too long."""
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
        if shift > _MAX_SHIFT:
            raise IndexError("a number of more than 64 bits")
