"""Streams of numbered messages that outlive the connections they are sent over. Knows no transport.

The sending end is a `ResumableStream`. It numbers its messages from 1 without gaps and keeps them in a
`ReplayLog` until they are acknowledged. Each connection of the other end is a `Link`, which begins after the
last message that was received over the one before: so nothing is lost or repeated. A new link replaces an
earlier one.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Generic, TypeVar

from service_kit.errors import ServiceError

MessageT = TypeVar("MessageT")
LinkT = TypeVar("LinkT", bound="Link")


class ReplayLog(Generic[MessageT]):
    """The messages of a stream from the first one that is not acknowledged to the last, without gaps.

    A full log accepts messages all the same: its owner decides which ones wait. Items are what messages
    carry, in a unit of the owner's choice. after: the number before that of the first message.
    """

    def __init__(self, *, max_bytes: int, max_items: int = sys.maxsize, after: int = 0) -> None:
        self.first_seq = after + 1  # `last_seq + 1` while it is empty
        self.last_seq = after
        self.size_bytes = 0
        self.num_items = 0
        self.is_full = False
        self._max_bytes = max_bytes
        self._max_items = max_items
        self._kept: dict[int, tuple[MessageT, int, int]] = {}

    def append(self, message: MessageT, size_bytes: int, num_items: int = 0) -> None:
        """Keep the next message, whose number is `last_seq + 1`."""
        self.last_seq += 1
        self._kept[self.last_seq] = (message, size_bytes, num_items)
        self.size_bytes += size_bytes
        self.num_items += num_items
        self.is_full = self.size_bytes > self._max_bytes or self.num_items > self._max_items

    def get(self, seq: int) -> MessageT:
        return self._kept[seq][0]

    def acknowledge(self, seq: int) -> None:
        """Drop the messages up to `seq`, which is clipped to the last one."""
        for number in range(self.first_seq, min(seq, self.last_seq) + 1):
            _, size_bytes, num_items = self._kept.pop(number)
            self.first_seq += 1
            self.size_bytes -= size_bytes
            self.num_items -= num_items
        self.is_full = self.size_bytes > self._max_bytes or self.num_items > self._max_items

    def trim(self, seq: int) -> None:
        """Drop the oldest messages, none after `seq`, until the log is not full."""
        while self.is_full and self.first_seq <= min(seq, self.last_seq):
            self.acknowledge(self.first_seq)

    def can_resume(self, seq: int) -> bool:
        """Whether every message after `seq` is kept or still to come."""
        return self.first_seq - 1 <= seq <= self.last_seq


class Link:
    """One connection over which a stream is read. after: the last message that the other end has received."""

    def __init__(self, *, after: int = 0) -> None:
        self.seq = after  # of the last message that was sent over it


class ResumableStream(Generic[MessageT, LinkT]):
    """The sending end of a stream: its log, and the link over which it is read.

    `attach` a link, then `take` what is to be sent over it, and wait for `changed` when there is nothing.
    is_resumable: False if a message need not be kept after it was taken.
    """

    def __init__(self, log: ReplayLog[MessageT], *, is_resumable: bool = True) -> None:
        self.log = log
        self.is_resumable = is_resumable
        self.link: LinkT | None = None
        self.is_over = False  # no message is appended any more
        self.error: ServiceError | None = None  # with which it was ended
        self._changed = asyncio.Event()

    @property
    def has_news(self) -> bool:
        """Whether something has changed since the last `changed` returned."""
        return self._changed.is_set()

    def attach(self, link: LinkT) -> LinkT | None:
        """Continue over `link`; returns the link that it replaces."""
        replaced, self.link = self.link, link
        self.wake()
        return replaced

    def detach(self, link: LinkT) -> bool:
        """Continue without a link; returns False if `link` was replaced before."""
        if self.link is not link:
            return False
        self.link = None
        self.wake()
        return True

    def take(self, link: LinkT) -> MessageT | None:
        """The next message to send over `link`; None if all were sent."""
        if link.seq == self.log.last_seq:
            return None
        link.seq += 1
        message = self.log.get(link.seq)
        if not self.is_resumable:
            self.log.acknowledge(link.seq)
        return message

    def end(self, error: ServiceError | None = None) -> bool:
        """Append no more messages; returns False if it had ended before: the first end counts."""
        if self.is_over:
            return False
        self.is_over, self.error = True, error
        self.wake()
        return True

    def wake(self) -> None:
        """Note a change: a message, an end, another link, or an acknowledgement."""
        self._changed.set()

    async def changed(self) -> None:
        """Wait for a change after the one that ended the last wait; check anew after each."""
        await self._changed.wait()
        self._changed.clear()
