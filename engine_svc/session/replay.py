"""The messages of a session that its frontend has not acknowledged, for replay after a reconnect.

Runs on the event loop. Knows no stream and no request.
"""

from __future__ import annotations

from collections import deque

from engine_svc.admin.announce import MAX_REPLAY_BYTES


class ReplayBuffer:
    """Numbered messages from the first unacknowledged one to the newest, without gaps.

    keeps: False for a session that cannot be resumed; its messages count as acknowledged at once.
    """

    def __init__(self, *, max_bytes: int = MAX_REPLAY_BYTES, keeps: bool = True) -> None:
        self.size_bytes = 0  # sum of all kept messages
        self._keeps = keeps
        self._max_bytes = max_bytes
        self._kept: deque[bytes] = deque()
        self._acknowledged = 0
        self._newest_seq = 0

    @property
    def acknowledged(self) -> int:
        """The highest seq that the frontend has acknowledged."""
        return self._acknowledged

    @property
    def newest_seq(self) -> int:
        """The seq of the last message."""
        return self._newest_seq

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be sent until the frontend has acknowledged some of it."""
        return self.size_bytes > self._max_bytes

    def keep(self, seq: int, message: bytes) -> None:
        """Keep a serialized message; its `seq` is the previous one plus 1."""
        assert seq == self._newest_seq + 1, "messages of a session are numbered without gaps"
        self._newest_seq = seq
        if not self._keeps:
            self._acknowledged = seq
            return
        self.size_bytes += len(message)
        self._kept.append(message)

    def acknowledge(self, last_seq: int) -> None:
        """Drop messages up to `last_seq`, which is clipped to the newest one sent."""
        kept, last_seq = self._kept, min(last_seq, self._newest_seq)
        while self._acknowledged < last_seq:
            self._acknowledged += 1
            self.size_bytes -= len(kept.popleft())

    def covers(self, last_seq: int) -> bool:
        """Whether every message after `last_seq` is still kept."""
        return self._acknowledged <= last_seq <= self._newest_seq

    def messages(self) -> list[bytes]:
        """All kept messages, oldest first."""
        return list(self._kept)
