"""The queue of tasks for text workers, which tenants share. Knows no processes and no clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass

from frontend_svc.text.tokenize.text_files import TextFiles
from frontend_svc.text.workers.frames import Frame
from triptych_kit.errors import ResourceExhausted, ServiceError
from triptych_kit.shares import SLOW_S, FairQueue, SharedLimit, SlowAccounts

# Tokenizing this much takes about 10 ms. Shorter texts do not wait for longer ones.
LONG_BYTES = 16 * 1024
# After this many short tasks a long one is due, so that long ones are not starved.
_MAX_SHORT_IN_A_ROW = 16
_MAX_REMEMBERED = 1024  # accounts of which it is known how long their tasks take
# Share of the newest task in what the next one of its account is expected to take.
_NEWEST_SHARE = 0.25
_MIN_SLOW_CPU_S = SLOW_S / 4
_RETRY_AFTER_MS = 1000


@dataclass(slots=True, eq=False)
class Work:
    """One task: the request to a worker, and the future of its answer.

    files: what it needs loaded.  account, weight: whose it is, and the weight of its share.
    began_at: when a worker began it, on the event loop's clock; 0 before, and while the worker loads `files`.
    queued_at, waited_s: when it was queued, and how long it was in the queue before it was taken.
    """

    files: TextFiles | None
    header: Mapping[str, object]
    body: bytes
    field: str
    answer: asyncio.Future[Frame]
    account: str = ""
    weight: int = 1
    num_attempts: int = 0
    is_queued: bool = False
    queued_at: float = 0.0
    waited_s: float = 0.0
    began_at: float = 0.0
    cpu_s: float = math.inf  # what its process used for it, if it took more than `SLOW_S`
    expected_s: float = 0.0  # what its account was charged for it when it was taken
    expiry: asyncio.TimerHandle | None = None

    @property
    def is_long(self) -> bool:
        return len(self.body) > LONG_BYTES

    def fail(self, error: ServiceError) -> None:
        """Answer with `error`, unless the answer is set or cancelled."""
        if not self.answer.done():
            self.answer.set_exception(error)


class WorkQueue:
    """Short tasks and long ones, each in the order of a `FairQueue`, and what of them runs.

    What an account uses is the time for which its tasks occupy workers. An account with a task of more than
    `SLOW_S` now or in the last minute is a slow one, unless little of that was CPU time. While accounts that
    are not slow send tasks, slow ones do not get the last free worker; and where slow ones have all workers
    that may run long tasks, an account that is not slow and runs none gets the worker that is reserved for
    short ones.
    """

    def __init__(self, num_workers: int, max_pieces: int, max_bytes: int) -> None:
        self._max_slow = max(1, num_workers - 1)
        self._has_reserve = num_workers > 1
        self._max_pieces, self._max_bytes = max_pieces, max_bytes
        self._pieces, self._bytes = SharedLimit(max_pieces), SharedLimit(max_bytes)
        self._short: FairQueue[Work] = FairQueue()
        self._long: FairQueue[Work] = FairQueue()
        self._num_short_in_a_row = 0
        self._running: set[Work] = set()
        self._accounts = SlowAccounts()
        self._mean_s: dict[str, float] = {}  # the account whose last task ended first comes first

    def __len__(self) -> int:
        return self._pieces.total

    def check_room(self, work: Work) -> None:
        """Raise ResourceExhausted if `work` does not fit. An empty queue takes a task of any size."""
        account, weight, num_bytes = work.account, work.weight, len(work.body)
        if not self._pieces.has_room(account, weight):
            words = self._pieces.words(account, weight)
            raise _full(
                f"{len(self)} texts are waiting to be tokenized, the limit is {self._max_pieces}{words}"
            )
        if len(self) and not self._bytes.has_room(account, weight, num_bytes):
            words = self._bytes.words(account, weight)
            raise _full(
                f"texts of {self._bytes.total} bytes are waiting to be tokenized, {num_bytes} more exceed "
                f"the limit of {self._max_bytes}{words}"
            )

    def add(self, work: Work, now: float, *, first: bool = False) -> None:
        """Append `work` to its queue; with `first`, for a task that was taken before, put it at the head."""
        account = work.account
        self._accounts.see(account, now)
        self._pieces.take(account, work.weight)
        self._bytes.take(account, work.weight, len(work.body))
        work.is_queued, work.queued_at = True, now
        self._of(work).add(work, account, work.weight, first=first)

    def take(self, now: float, *, may_be_long: bool) -> Work | None:
        """Remove and return the next task, which runs until `end` or `put_back`.

        Only a short one unless `may_be_long`, or unless slow accounts run all the long ones.
        """

        def may_take(account: str) -> bool:
            return self._may_take(account, now)

        def may_take_long(account: str) -> bool:
            return self._may_take(account, now) and (may_be_long or self._may_exceed(account, now))

        is_long_due = not len(self._short) or self._num_short_in_a_row >= _MAX_SHORT_IN_A_ROW
        work = self._long.take(may_take_long) if is_long_due else None
        work = work or self._short.take(may_take)
        if work is None and not is_long_due:
            work = self._long.take(may_take_long)
        if work is None:
            return None
        self._num_short_in_a_row = 0 if work.is_long else self._num_short_in_a_row + 1
        self._leave(work)
        self._running.add(work)
        work.waited_s += now - work.queued_at
        work.expected_s = self._mean_s.get(work.account, 0.0)
        self._of(work).charge(work.account, work.expected_s)
        return work

    def put_back(self, work: Work, now: float) -> None:
        """Queue a task that was taken, and that no worker has begun, at the head again."""
        self._running.discard(work)
        self._of(work).charge(work.account, -work.expected_s)
        self.add(work, now, first=True)

    def end(self, work: Work, now: float) -> None:
        """A worker has ended with `work`, in whatever way: charge its account for the time that it took."""
        self._running.discard(work)
        took_s = now - work.began_at if work.began_at else 0.0
        work.began_at = 0.0
        self._of(work).charge(work.account, took_s - work.expected_s)
        # One that waited for a core, as others' tasks do to it, does not make its account a slow one.
        if work.cpu_s > _MIN_SLOW_CPU_S:
            self._accounts.note(work.account, took_s, now)
        mean_s = self._mean_s.pop(work.account, took_s)
        self._mean_s[work.account] = mean_s + _NEWEST_SHARE * (took_s - mean_s)
        if len(self._mean_s) > _MAX_REMEMBERED:
            del self._mean_s[next(iter(self._mean_s))]

    def remove(self, work: Work) -> None:
        """Remove `work` if it is queued."""
        if work.is_queued:
            self._of(work).remove(work, work.account)
            self._leave(work)

    def clear(self) -> list[Work]:
        """Remove and return all tasks."""
        removed = []
        for queue in (self._short, self._long):
            while (work := queue.take()) is not None:
                self._leave(work)
                removed.append(work)
        return removed

    def _of(self, work: Work) -> FairQueue[Work]:
        return self._long if work.is_long else self._short

    def _leave(self, work: Work) -> None:
        work.is_queued = False
        self._pieces.give_back(work.account)
        self._bytes.give_back(work.account, len(work.body))

    def _may_take(self, account: str, now: float) -> bool:
        """Whether a worker would be left for accounts that are not slow, where there are some."""
        if not self._has_reserve or not self._is_slow(account, now):
            return True
        if sum(self._is_slow(work.account, now) for work in self._running) < self._max_slow:
            return True
        return all(self._is_slow(other, now) for other in self._accounts.others_seen(now))

    def _may_exceed(self, account: str, now: float) -> bool:
        """Whether `account` may run a long task although as many run as may: slow ones of others alone."""
        others = [work.account for work in self._running if work.is_long]
        return (
            self._has_reserve
            and bool(others)
            and account not in others
            and not self._is_slow(account, now)
            and all(self._is_slow(other, now) for other in others)
        )

    def _is_slow(self, account: str, now: float) -> bool:
        return self._accounts.is_slow(account, now) or any(
            work.account == account and work.began_at and now - work.began_at > SLOW_S
            for work in self._running
        )


def _full(text: str) -> ResourceExhausted:
    return ResourceExhausted(text, reason="TEXT_QUEUE_FULL", retry_after_ms=_RETRY_AFTER_MS)
