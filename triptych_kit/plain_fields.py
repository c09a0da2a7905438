"""Fields of a message that hold plain values, with their Python types, from which other forms are derived."""

from __future__ import annotations

from collections.abc import Mapping
from types import GenericAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_TYPES: Mapping[int, type] = {
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_INT64: int,
    FieldDescriptor.CPPTYPE_STRING: str,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
}


def plain_fields(message: type[Message]) -> dict[str, type | GenericAlias]:
    """Fields that hold a number, a truth value, a text or a list of them, with the types of their values."""
    plain = {}
    for field in message.DESCRIPTOR.fields:
        kind = _TYPES.get(field.cpp_type)
        if kind is not None and field.type != FieldDescriptor.TYPE_BYTES:
            plain[field.name] = GenericAlias(list, kind) if field.is_repeated else kind
    return plain
