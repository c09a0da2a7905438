"""The items of a session's conversation, up to limits."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from frontend_svc.protocols.openai.bodies import IgnoredFields, encode
from frontend_svc.protocols.openai.response_items import add_item
from triptych_kit.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from triptych_kit.shares import LimitPart

# Of all conversations of this process.
MAX_SUM_BYTES = 256 * 1024 * 1024
# Names the beginning of the conversation where an id names the item before.
_ROOT = "root"
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_PREFIXES = {"function_call": "fc", "function_call_output": "fco"}

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    max_items: int = 2048
    max_bytes: int = 8 * 1024 * 1024  # of their JSON


class Conversation:
    """Items in order, as events show them. held: its bytes, among those of all conversations."""

    def __init__(self, limits: ConversationLimits, held: LimitPart) -> None:
        self.id = f"conv_{secrets.token_hex(12)}"
        self._limits, self._held = limits, held
        self._items: list[Item] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def check_room(self, num_bytes: int = 0) -> None:
        """Raise ResourceExhausted if an item of `num_bytes` does not fit."""
        limits, held = self._limits, self._held
        if len(self._items) >= limits.max_items or held.amount + num_bytes > limits.max_bytes:
            raise ResourceExhausted(
                f"the conversation has {len(self._items)} items of {held.amount} bytes, the limits are "
                f"{limits.max_items} and {limits.max_bytes}: delete some with conversation.item.delete",
                reason="CONVERSATION_TOO_LONG",
            )
        if not held.has_room(num_bytes):
            raise ResourceExhausted(
                f"all conversations have {held.shared.total} bytes, the limit is {held.shared.limit}"
                f"{held.words()}",
                reason="TOO_MANY_CONVERSATIONS",
            )

    def clear(self) -> None:
        """Forget all items at the end of the session."""
        self._held.clear()
        self._items.clear()

    def create(self, item: Item, previous_id: str | None) -> str | None:
        """Insert an item behind the one named, or as the last. Returns the id of the one before it."""
        if any(each["id"] == item["id"] for each in self._items):
            raise AlreadyExists(
                f"item.id {item['id']!r} is that of another item", metadata={"field": "item.id"}
            )
        index = len(self._items)
        if previous_id == _ROOT:
            index = 0
        elif previous_id is not None:
            index = self._index(previous_id, "previous_item_id") + 1
        num_bytes = len(encode(item))
        self.check_room(num_bytes)
        self._items.insert(index, item)
        self._held.add(num_bytes)
        return self._items[index - 1]["id"] if index else None

    def append(self, item: Item) -> str | None:
        """Add an item of a response, which is as long as it is. Returns the id of the one before it."""
        self._items.append(item)
        self._held.add(len(encode(item)))
        return self._items[-2]["id"] if len(self._items) > 1 else None

    def replace(self, item: Item) -> str | None:
        """The item as it is now, unless it was deleted. Returns the id of the one before it."""
        for index, each in enumerate(self._items):
            if each["id"] == item["id"]:
                self._items[index] = item
                self._held.add(len(encode(item)) - len(encode(each)))
                return self._items[index - 1]["id"] if index else None
        return None

    def get(self, item_id: str, field: str = "item_id") -> Item:
        """Raises NotFound."""
        return self._items[self._index(item_id, field)]

    def delete(self, item_id: str) -> None:
        """Raises NotFound."""
        self._held.add(-len(encode(self._items.pop(self._index(item_id, "item_id")))))

    def _index(self, item_id: str, field: str) -> int:
        for index, item in enumerate(self._items):
            if item["id"] == item_id:
                return index
        raise NotFound(
            f"{field} is {item_id!r:.140}, which is no item of the conversation",
            resource_type="item",
            resource_name=item_id,
            reason="ITEM_NOT_FOUND",
            metadata={"field": field},
        )


def read_item(raw: Mapping[str, Any], ignored: IgnoredFields, at: str) -> Item:
    """An item of a client; `at` is its field. Raises InvalidArgument and Unimplemented."""
    kind = raw.get("type", "message")
    fields = {name: value for name, value in raw.items() if value is not None and name != "object"}
    if kind == "function_call":
        fields = {"call_id": f"call_{secrets.token_hex(12)}", **fields}
    add_item([], fields, ignored, at)
    item_id = fields.get("id", f"{_PREFIXES.get(kind, 'msg')}_{secrets.token_hex(12)}")
    if not _ID.fullmatch(item_id):
        raise InvalidArgument(f"{at}.id must be 1..128 printable characters without spaces", field=f"{at}.id")
    fixed = {"id": item_id, "object": "realtime.item", "type": kind}
    return {"status": "completed", **fields, **fixed}


def as_input(item: Item) -> Item:
    """The item as one of the Responses API."""
    return {name: value for name, value in item.items() if name != "object"}
