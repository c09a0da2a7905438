"""The queue of tasks for text workers. Knows no processes and no clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from frontend_svc.text.tokenize.text_files import TextFiles
from frontend_svc.text.workers.frames import Frame
from triptych_kit.errors import ServiceError

# Tokenizing this much takes about 10 ms. Shorter texts do not wait for longer ones.
LONG_BYTES = 16 * 1024
# After this many short tasks a long one is due, so that long ones are not starved.
_MAX_SHORT_IN_A_ROW = 16


@dataclass(slots=True, eq=False)
class Work:
    """One task: the request to a worker, and the future of its answer.

    files: what it needs loaded.
    """

    files: TextFiles | None
    header: Mapping[str, object]
    body: bytes
    field: str
    answer: asyncio.Future[Frame]
    num_attempts: int = 0
    is_queued: bool = False
    expiry: asyncio.TimerHandle | None = None

    @property
    def is_long(self) -> bool:
        return len(self.body) > LONG_BYTES

    def fail(self, error: ServiceError) -> None:
        """Answer with `error`, unless the answer is set or cancelled."""
        if not self.answer.done():
            self.answer.set_exception(error)


class WorkQueue:
    """Two FIFO queues, one for short tasks and one for long ones."""

    def __init__(self, max_pieces: int, max_bytes: int) -> None:
        self._max_pieces = max_pieces
        self._max_bytes = max_bytes
        self._short: deque[Work] = deque()
        self._long: deque[Work] = deque()
        self._num_bytes = 0
        self._num_short_in_a_row = 0

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def has_room_for(self, work: Work) -> bool:
        """Whether `work` fits. An empty queue takes a task of any size."""
        has_bytes = self._num_bytes + len(work.body) <= self._max_bytes or not len(self)
        return has_bytes and len(self) < self._max_pieces

    def add(self, work: Work, *, first: bool = False) -> None:
        """Append `work` to its queue; with `first`, for a task that was taken before, put it at the head."""
        queue = self._long if work.is_long else self._short
        self._num_bytes += len(work.body)
        work.is_queued = True
        if first:
            queue.appendleft(work)
        else:
            queue.append(work)

    def take(self, *, may_be_long: bool) -> Work | None:
        """Remove and return the next task; only a short one unless `may_be_long`."""
        is_long_due = not self._short or self._num_short_in_a_row >= _MAX_SHORT_IN_A_ROW
        takes_long = may_be_long and bool(self._long) and is_long_due
        if not takes_long and not self._short:
            return None
        self._num_short_in_a_row = 0 if takes_long else self._num_short_in_a_row + 1
        work = self._long.popleft() if takes_long else self._short.popleft()
        self._num_bytes -= len(work.body)
        work.is_queued = False
        return work

    def remove(self, work: Work) -> None:
        """Remove `work` if it is queued."""
        if work.is_queued:
            (self._long if work.is_long else self._short).remove(work)
            self._num_bytes -= len(work.body)
            work.is_queued = False
