"""Large values in extras, which reach each rank once and are referred to by their digest afterwards.

Both ends of a channel have the same table, as both apply the same rule to the same messages. Knows no
channel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Generic, TypeVar

_MAX_BYTES = 128 << 20


class Content(ABC):
    """Base of a frozen dataclass whose values are equal where their digests are."""

    __slots__ = ()

    @property
    @abstractmethod
    def digest(self) -> str: ...

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """About its size in a message; the same at both ends."""


T = TypeVar("T")


class ContentTable(Generic[T]):
    """What the other end of a channel has been sent, or what came from it, the least recently used first.

    The least recently used give way to others, but for the newest. A request that refers to a value keeps it.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, tuple[int, T]] = OrderedDict()  # sizes and values, by digest
        self._num_bytes = 0

    def use(self, digest: str) -> T | None:
        """The value of a digest, which is now the most recently used; None: not in the table."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        self._entries.move_to_end(digest)
        return entry[1]

    def add(self, digest: str, size_bytes: int, value: T) -> None:
        """Add a value that is not in the table."""
        self._entries[digest] = size_bytes, value
        self._num_bytes += size_bytes
        while self._num_bytes > self._max_bytes and len(self._entries) > 1:
            _, (dropped_bytes, _) = self._entries.popitem(last=False)
            self._num_bytes -= dropped_bytes
