"""Streams of numbered messages that outlive the connections they are sent over. Knows no transport.

The sending end is a `ResumableStream`. It numbers its messages from 1 without gaps and keeps them in a
`ReplayLog` until they are acknowledged. Each connection of the other end is a `Link`, which begins after the
last message that was received over the one before: so nothing is lost or repeated. A new link replaces an
earlier one.

The receiving end has a `StreamReceiver` for each connection. It checks that no number is missing,
acknowledges a message when it was handled whole, and knows after which message the next connection begins. A
`SilenceTimer` detects a connection over which nothing arrives any more, heartbeats included.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from triptych_kit.clock import Clock
from triptych_kit.errors import ServiceError

_MAX_MISSED_HEARTBEATS = 3

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
        self.has_news = False  # something has changed since the last `changed` returned
        self._changed = asyncio.Event()

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

    def acknowledge(self, seq: int) -> None:
        """The other end has received the messages up to `seq`, which is clipped to the last one sent."""
        if self.link is not None:
            self.log.acknowledge(min(seq, self.link.seq))

    def end(self, error: ServiceError | None = None) -> bool:
        """Append no more messages; returns False if it had ended before: the first end counts."""
        if self.is_over:
            return False
        self.is_over, self.error = True, error
        self.wake()
        return True

    def wake(self) -> None:
        """Note a change: a message, an end, another link, or an acknowledgement."""
        self.has_news = True
        self._changed.set()

    async def changed(self) -> None:
        """Wait for a change after the one that ended the last wait; check anew after each."""
        await self._changed.wait()
        self._changed.clear()
        self.has_news = False


class NumberedMessage(Protocol):
    """A protobuf message with a number."""

    @property
    def seq(self) -> int: ...

    def ByteSize(self) -> int: ...


NumberedT = TypeVar("NumberedT", bound=NumberedMessage)


class MessageGap(Exception):
    """A message does not have the number after that of the last one."""


class EndOfStream(Exception):
    """The other end has ended the connection."""


class PeerSilent(Exception):
    """Nothing was received for several heartbeats."""


class SilenceTimer:
    """Detects that nothing arrives from a peer that sends heartbeats."""

    def __init__(self, clock: Clock, *, heartbeat_s: float) -> None:
        self.clock = clock
        self.received_at = clock.now()
        self.is_handling = False  # while a message is handled, none is read
        self._heartbeat_s = heartbeat_s

    async def watch(self) -> NoReturn:
        """Raise PeerSilent after three heartbeats without a message, from now on."""
        limit_s = self._heartbeat_s * _MAX_MISSED_HEARTBEATS
        self.received_at = self.clock.now()
        while True:
            slept_from = self.clock.now()
            wait_s = min(self._heartbeat_s, max(0.0, self.received_at + limit_s - slept_from) + 0.001)
            await asyncio.sleep(wait_s)
            now = self.clock.now()
            # After a stop of this process, messages that arrived meanwhile are still to be read.
            if self.is_handling or now - slept_from > wait_s + self._heartbeat_s:
                self.received_at = now
            if now - self.received_at > limit_s:
                raise PeerSilent(f"no heartbeat for {now - self.received_at:.1f} s")


class StreamReceiver(Generic[NumberedT]):
    """The receiving end of a stream over one connection. `begin`, then `run`."""

    def __init__(self, silence: SilenceTimer, *, last_seq: int = 0) -> None:
        self.last_seq = last_seq  # of the last message that was handled whole
        self.silence = silence
        self._acknowledged_seq = last_seq
        self._num_unacknowledged_bytes = 0
        self._max_messages = 0
        self._max_bytes = 0
        self._max_delay_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def begin(self, *, is_resumed: bool, max_messages: int, max_bytes: int, max_delay_s: float) -> None:
        """Receive the messages after `last_seq`, or a new stream if the other end does not resume this one.

        Acknowledges after `max_messages`, `max_bytes` or `max_delay_s`, whichever comes first;
        `max_messages=0` disables it.
        """
        if not is_resumed:
            self.last_seq = self._acknowledged_seq = 0
        self._max_messages, self._max_bytes, self._max_delay_s = max_messages, max_bytes, max_delay_s

    async def run(
        self,
        read: Callable[[], Awaitable[Any]],
        on_message: Callable[[NumberedT], Awaitable[None]],
        acknowledge: Callable[[int], None],
        *,
        end: object,
    ) -> None:
        """Pass each message to `on_message`, and read the next one when that has returned.

        acknowledge: sends the number of the last message that was handled.
        Raises EndOfStream when `read` returns `end`, and MessageGap. Returns only after `close`.
        """
        silence, now = self.silence, self.silence.clock.now
        while not self._is_closed:
            message = await read()
            if message is end:
                raise EndOfStream
            silence.received_at = now()
            if message.seq != self.last_seq + 1:
                raise MessageGap(f"message {message.seq} came after {self.last_seq}")
            silence.is_handling = True
            try:
                await on_message(message)
            finally:
                silence.is_handling = False
            self.last_seq = message.seq
            if self._max_messages:
                self._on_handled(message.ByteSize(), acknowledge)
            # Nothing was read meanwhile, so this time does not count as silence of the peer.
            silence.received_at = now()

    def close(self) -> None:
        """Read and acknowledge no more. A message that is being handled is handled to its end."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _on_handled(self, size_bytes: int, acknowledge: Callable[[int], None]) -> None:
        self._num_unacknowledged_bytes += size_bytes
        if (
            self.last_seq - self._acknowledged_seq >= self._max_messages
            or self._num_unacknowledged_bytes >= self._max_bytes
        ):
            self._send(acknowledge)
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._max_delay_s, self._on_timer, acknowledge)

    def _on_timer(self, acknowledge: Callable[[int], None]) -> None:
        self._timer = None
        if self._acknowledged_seq < self.last_seq:
            self._send(acknowledge)

    def _send(self, acknowledge: Callable[[int], None]) -> None:
        self._acknowledged_seq, self._num_unacknowledged_bytes = self.last_seq, 0
        acknowledge(self.last_seq)
