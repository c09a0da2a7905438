"""Messages from one process to several, through a ring buffer in anonymous shared memory. Knows no plans.

The memory holds the bytes. The numbers of bytes written and read travel through eventfd counters, which also
order memory accesses between the two sides. Nothing is left behind when the processes end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_CAPACITY = 1 << 20

# Number of pieces sent before, length of this one, whether more pieces of the message follow.
_PIECE = struct.Struct("<QII")
# A piece takes at most a quarter of the ring: readers begin while the writer continues.
_PIECES_IN_RING = 4


class ChannelError(RuntimeError):
    """The bytes read are not those written: a bug."""


class ChannelInterrupted(RuntimeError):
    """The wait was interrupted because the other side is gone."""


class ChannelTimeout(RuntimeError):
    """The other side did not read, or write, within the timeout."""


@dataclass(frozen=True, slots=True)
class ReaderEnd:
    """File descriptors that a reading process inherits, and the capacity."""

    memory_fd: int
    written_fd: int
    read_fd: int
    capacity: int

    @property
    def fds(self) -> tuple[int, int, int]:
        return self.memory_fd, self.written_fd, self.read_fd


@dataclass(frozen=True, slots=True)
class WriterEnd:
    """Descriptors of the writing process: the memory, and for each reader (written, read)."""

    memory_fd: int
    reader_fds: tuple[tuple[int, int], ...]
    capacity: int

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.memory_fd, *(fd for pair in self.reader_fds for fd in pair))


@dataclass(frozen=True, slots=True)
class Channel:
    """A ring that is not in use yet."""

    writer: WriterEnd
    readers: tuple[ReaderEnd, ...]

    def close(self) -> None:
        """Close this process's descriptors. Memory and counters end with the last process that has them."""
        for fd in self.writer.fds:
            os.close(fd)


def create_channel(num_readers: int, capacity: int = DEFAULT_CAPACITY) -> Channel:
    """A ring of `capacity` bytes for one writer and `num_readers` readers, all of which get every message."""
    memory_fd = os.memfd_create("triptych-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory_fd, capacity)
    # Sealed: no process can shrink the memory and so crash the others.
    fcntl.fcntl(memory_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    pairs = tuple((_counter(), _counter()) for _ in range(num_readers))
    readers = tuple(ReaderEnd(memory_fd, written, read, capacity) for written, read in pairs)
    return Channel(WriterEnd(memory_fd, pairs, capacity), readers)


class ChannelWriter:
    """The writing end. A message longer than the ring is sent in pieces, as fast as the readers read.

    replies: what the readers write in turn. It is read while they make no room, as they may be waiting for
    that.
    """

    def __init__(
        self, end: WriterEnd, *, interrupt_fd: int | None = None, replies: ChannelReader | None = None
    ) -> None:
        self._ring = _Ring(end.memory_fd, end.capacity)
        self._reader_fds = end.reader_fds
        self._unread = [0] * len(end.reader_fds)  # bytes, as far as this side knows
        self._waiters = [_Waiter(read_fd, interrupt_fd, replies) for _, read_fd in end.reader_fds]
        self._num_pieces = 0
        self._position = 0

    def send(self, message: bytes, *, timeout_s: float) -> None:
        """Send the message to every reader.

        Raises ChannelTimeout if a reader makes no room for a piece within timeout_s, ChannelInterrupted if
        the wait is interrupted.
        """
        max_piece = self._ring.capacity // _PIECES_IN_RING - _PIECE.size
        # An empty message is one piece, too.
        for start in range(0, len(message) or 1, max_piece):
            piece = message[start : start + max_piece]
            self._send_piece(piece, has_more=start + max_piece < len(message), timeout_s=timeout_s)

    def close(self) -> None:
        self._ring.close()

    def _send_piece(self, piece: bytes, *, has_more: bool, timeout_s: float) -> None:
        size = _PIECE.size + len(piece)
        for reader in range(len(self._unread)):
            self._make_room(reader, size, timeout_s)
        self._ring.put(self._position, _PIECE.pack(self._num_pieces, len(piece), has_more) + piece)
        self._position += size
        self._num_pieces += 1
        for reader, (written_fd, _) in enumerate(self._reader_fds):
            self._unread[reader] += size
            os.eventfd_write(written_fd, size)

    def _make_room(self, reader: int, size: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._ring.capacity - self._unread[reader] < size:
            num_read = self._waiters[reader].take(deadline)
            if num_read is None:
                raise ChannelTimeout(f"reader {reader} made no room for {size} bytes in {timeout_s} s")
            self._unread[reader] -= num_read


class ChannelReader:
    """A reading end. spin_s: how long to poll before sleeping."""

    def __init__(self, end: ReaderEnd, *, interrupt_fd: int | None = None, spin_s: float = 0.0) -> None:
        self.written_fd = end.written_fd  # readable when there is more
        self._ring = _Ring(end.memory_fd, end.capacity)
        self._read_fd = end.read_fd
        self._waiter = _Waiter(end.written_fd, interrupt_fd)
        self._spin_s = spin_s
        self._kept: deque[bytes] = deque()  # messages that were read before `receive` asked for them
        self._available = 0
        self._num_pieces = 0
        self._position = 0

    def receive(self, *, timeout_s: float | None = None) -> bytes | None:
        """The next message; None if there is none within timeout_s. Without timeout_s, waits forever.

        Raises ChannelInterrupted if the wait is interrupted.
        """
        if self._kept:
            return self._kept.popleft()
        return self._read(None if timeout_s is None else time.monotonic() + timeout_s)

    def keep(self) -> None:
        """Read all written messages, for `receive` to return later."""
        while (message := self._read(0.0)) is not None:
            self._kept.append(message)

    def close(self) -> None:
        self._ring.close()

    def _read(self, deadline: float | None) -> bytes | None:
        piece, has_more = self._next_piece(deadline)
        if piece is None or not has_more:
            return piece
        pieces = [piece]
        while has_more:
            # The writer is sending: either the rest arrives, or the wait is interrupted when the writer ends.
            piece, has_more = self._next_piece(None)
            assert piece is not None, "a receive without timeout returned no message"
            pieces.append(piece)
        return b"".join(pieces)

    def _next_piece(self, deadline: float | None) -> tuple[bytes | None, bool]:
        if not self._available:
            num_written = self._waiter.take(deadline, self._spin_s)
            if num_written is None:
                return None, False
            self._available += num_written
        number, length, has_more = _PIECE.unpack(self._ring.get(self._position, _PIECE.size))
        size = _PIECE.size + length
        if number != self._num_pieces or size > self._available:
            raise ChannelError(f"piece {number} of {length} bytes, expected piece {self._num_pieces}")
        piece = self._ring.get(self._position + _PIECE.size, length)
        self._position += size
        self._available -= size
        self._num_pieces += 1
        os.eventfd_write(self._read_fd, size)
        return piece, bool(has_more)


class _Ring:
    """Bytes at positions that only grow; the offset in memory is the position modulo the capacity."""

    def __init__(self, memory_fd: int, capacity: int) -> None:
        self.capacity = capacity
        self._memory = mmap.mmap(memory_fd, capacity)

    def close(self) -> None:
        self._memory.close()

    def put(self, position: int, data: bytes) -> None:
        offset = position % self.capacity
        end = min(len(data), self.capacity - offset)
        self._memory[offset : offset + end] = data[:end]
        self._memory[: len(data) - end] = data[end:]

    def get(self, position: int, size: int) -> bytes:
        offset = position % self.capacity
        data = self._memory[offset : offset + size]
        return data if len(data) == size else data + self._memory[: size - len(data)]


class _Waiter:
    """Waits for a counter that the other side increments, and reads `replies` meanwhile."""

    def __init__(self, fd: int, interrupt_fd: int | None, replies: ChannelReader | None = None) -> None:
        self._fd = fd
        self._interrupt_fd = interrupt_fd
        self._replies = replies
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        if interrupt_fd is not None:
            self._poll.register(interrupt_fd, select.POLLIN)
        if replies is not None:
            self._poll.register(replies.written_fd, select.POLLIN)

    def take(self, deadline: float | None, spin_s: float = 0.0) -> int | None:
        """The increments since the last call; None if there were none until the deadline."""
        spin_until = time.monotonic() + spin_s if spin_s else 0.0
        while True:
            try:
                return os.eventfd_read(self._fd)
            except BlockingIOError:
                if spin_s and time.monotonic() < spin_until:
                    continue
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return None
            if self._replies is not None:
                # Before the wait: the counter does not signal again for messages that are counted but not
                # read.
                self._replies.keep()
            ready = self._poll.poll(None if remaining is None else remaining * 1000)
            if any(fd == self._interrupt_fd for fd, _ in ready):
                raise ChannelInterrupted("the other side of the channel is gone")


def _counter() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def reader_end(values: Sequence[int]) -> ReaderEnd:
    """The end that another process has sent as these numbers: descriptors, then the capacity."""
    memory_fd, written_fd, read_fd, capacity = values
    return ReaderEnd(memory_fd, written_fd, read_fd, capacity)


def writer_end(values: Sequence[int]) -> WriterEnd:
    """The end that these numbers describe: memory, capacity, and each reader's two counters."""
    memory_fd, capacity, *fds = values
    return WriterEnd(memory_fd, tuple(zip(fds[::2], fds[1::2], strict=True)), capacity)
