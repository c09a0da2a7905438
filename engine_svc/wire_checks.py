"""How what a frontend sends is refused: by field, value and limit. Knows no field by name."""

from __future__ import annotations

import sys
from array import array

from google.protobuf.message import Message

from service_kit.errors import InvalidArgument, Unimplemented


def check(holds: bool, name: str, value: float, limit: str) -> None:
    """Raise InvalidArgument that says what was wrong, unless `holds`."""
    if not holds:
        raise InvalidArgument(f"{name} is {value}, it takes {limit}", field=name)


def to_token_ids(column: bytes, name: str, vocab_size: int) -> list[int]:
    """The ids of a u32 column. InvalidArgument where it is cut short or an id is not of the vocabulary."""
    if not column:
        return []
    if len(column) % 4:
        raise InvalidArgument(f"{name} has {len(column)} bytes, it takes whole u32 values", field=name)
    token_ids = array("I", column)
    if sys.byteorder == "big":
        token_ids.byteswap()
    largest = max(token_ids, default=0)
    check(largest < vocab_size, name, largest, f"below the vocabulary's size, {vocab_size}")
    return token_ids.tolist()


def refuse_unserved(message: Message, names: tuple[str, ...]) -> None:
    """Raise Unimplemented for the first field of these names that is set."""
    for descriptor, _ in message.ListFields():
        if descriptor.name in names:
            raise unserved(descriptor.name)


def unserved(name: str) -> Unimplemented:
    """The error that says that this engine does not serve what `name` asks for."""
    return Unimplemented(
        f"{name} is not served by this engine", reason="UNIMPLEMENTED_FIELD", metadata={"field": name}
    )
