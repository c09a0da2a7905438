"""Validation of request fields: errors name the field, the value and the limit. Knows no field by name."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from triptych_kit.errors import InvalidArgument, Unimplemented


def check(holds: bool, name: str, value: float, limit: str) -> None:
    """Raise InvalidArgument with name, value and limit unless `holds`."""
    if not holds:
        raise InvalidArgument(f"{name} is {value}, it takes {limit}", field=name)


def check_enum(value: int, name: str, names: EnumTypeWrapper, values: Iterable[int]) -> None:
    """Raise InvalidArgument, which lists the names, unless `value` is one of `values` of an enum."""
    allowed = tuple(values)
    if value not in allowed:
        shown = ", ".join(map(names.Name, allowed))
        raise InvalidArgument(f"{name} is {value}, it takes one of {shown}", field=name)


def check_id(text: str, name: str, least: int, most: int) -> None:
    """Raise InvalidArgument unless `text` has `least` to `most` characters, all of which can be printed."""
    if not least <= len(text) <= most:
        raise InvalidArgument(f"{name} has {len(text)} characters, it takes {least} to {most}", field=name)
    if not text.isprintable():
        raise InvalidArgument(f"{name} is {text!r}, it takes characters that can be printed", field=name)


def to_token_ids(column: bytes, name: str, vocab_size: int) -> list[int]:
    """The ids of a u32 column. InvalidArgument if it is truncated or an id is outside the vocabulary."""
    if not column:
        return []
    if len(column) % 4:
        raise InvalidArgument(f"{name} has {len(column)} bytes, it takes whole u32 values", field=name)
    values = array("I", column)
    if sys.byteorder == "big":
        values.byteswap()
    # The list first: `max` over an array would create an object for each id a second time.
    token_ids = values.tolist()
    largest = max(token_ids)
    check(largest < vocab_size, name, largest, f"below the vocabulary's size, {vocab_size}")
    return token_ids


def unserved(name: str) -> Unimplemented:
    """The error for a field `name` that this engine does not support."""
    return Unimplemented(
        f"{name} is not served by this engine", reason="UNIMPLEMENTED_FIELD", metadata={"field": name}
    )
