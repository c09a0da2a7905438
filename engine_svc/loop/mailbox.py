"""The only door of the engine thread: Inbox, Outbox per frontend, Board of figures, log of the prefix cache.

Every method returns at once but `Inbox.wait`, which only the engine thread calls. Knows no wire.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from engine_svc.cache.observer import StoredBlocks
from engine_svc.core.request import Request
from engine_svc.loop.step_output import StepOutput, UnreadSteps, split
from engine_svc.scheduler.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class Add:
    """Run `request`; its outputs go to `outbox` under `handle`. `deadline_at` is on the engine's clock.

    With `keeps_outputs` what it yields stays there for who adopts it, until it is forgotten. `is_suspect`: an
    engine died that had it, and its sender sends the next one of those when it has yielded.
    """

    request: Request
    outbox: Outbox
    handle: int
    deadline_at: float | None = None
    keeps_outputs: bool = False
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class Adopt:
    """Send all that a kept request has yielded and will yield to `outbox`, under `handle`."""

    request_id: str
    outbox: Outbox
    handle: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Keep nothing any more of a request that nobody adopts. Ignored where nothing is kept."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request from outside, and why, for people. Ignored when it has ended already."""

    request_id: str
    cause: str = "client"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop, whatever still runs."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the loop with an error that was seen outside of it."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Call:
    """Do `work` in the engine thread, between two steps. It has to take its own errors."""

    work: Callable[[], None]


Command = Add | Abort | Adopt | Forget | Stop | Fail | Call


class Inbox:
    """Commands into the engine thread, in order. Only ADDs are refused when it is full.

    Aborts need no limit of their own: a sender may abort only what it has added.
    """

    def __init__(self, max_commands: int) -> None:
        self._max_commands = max_commands
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._woken_by: list[Command] = []  # the engine thread's, like what follows

    def put(self, command: Command) -> bool:
        """Hand over `command` and wake a parked loop. False where an ADD finds the inbox full."""
        if isinstance(command, Add) and self._commands.qsize() >= self._max_commands:
            return False
        self._commands.put(command)
        return True

    def take(self) -> list[Command]:
        """Everything that waits, oldest first; never blocks."""
        commands, self._woken_by = self._woken_by, []
        commands += [self._commands.get() for _ in range(self._commands.qsize())]
        return commands

    def wait(self, timeout_s: float | None) -> None:
        """Park until a command is there, or until the time is over."""
        if not self._woken_by:
            with contextlib.suppress(queue.Empty):
                self._woken_by.append(self._commands.get(timeout=timeout_s))


class Outbox:
    """Steps of one frontend session on their way out of the engine thread.

    A reader that falls behind finds the unread steps merged into one, or into as few as messages can hold.
    Past `max_bytes` of them the outbox overflows: it keeps nothing more, and its session has to end.
    """

    def __init__(self, *, max_bytes: int, wake: Callable[[], None]) -> None:
        self._max_bytes = max_bytes
        self._wake = wake
        self._lock = threading.Lock()
        self._unread = UnreadSteps()
        self._rest: deque[StepOutput] = deque()  # of what was taken and is too large for one message
        self._is_closed = False
        self._has_overflowed = False

    def publish(self, output: StepOutput) -> None:
        """Leave a step for the reader and wake it, once per time that it comes to look."""
        with self._lock:
            if self._is_closed or self._has_overflowed:
                return
            must_wake = self._unread.is_empty
            self._unread.add(output)
            # One step alone is taken whatever its size: nobody can have read it faster.
            self._has_overflowed = not must_wake and self._unread.size_bytes > self._max_bytes
            if must_wake or self._has_overflowed:
                self._wake()

    def take(self) -> StepOutput | None:
        """All unread steps as one, or where no message can hold it, its next piece; None: nothing waits."""
        if not self._rest:
            if self._unread.is_empty:
                return None
            with self._lock:
                unread, self._unread = self._unread, UnreadSteps()
            self._rest.extend(split(unread.merged()))
        return self._rest.popleft()

    @property
    def has_unread(self) -> bool:
        """Whether a step, or the rest of one, waits to be taken."""
        return bool(self._rest) or not self._unread.is_empty

    @property
    def has_rest(self) -> bool:
        """Whether a step was taken in part."""
        return bool(self._rest)

    def close(self) -> None:
        """Drop what is unread and whatever still comes. After this, nobody is woken any more."""
        with self._lock:
            self._is_closed = True
            self._unread = UnreadSteps()
            self._rest.clear()
            # Whoever is woken has the outbox: a cycle that only a full collection would free.
            self._wake = _skip_wake

    @property
    def has_overflowed(self) -> bool:
        """Whether outputs were lost because nobody read them."""
        return self._has_overflowed


@dataclass(frozen=True, slots=True)
class LoopStats:
    """The loop's figures at one moment. `step_started_at` is None while no step is in flight.

    Of several it is the oldest's, or when the one before it was over; while a call runs, it is the call's.
    """

    step_number: int = 0
    step_started_at: float | None = None
    step_budget_s: float | None = None  # how long what runs may take; None: no longer than usual
    is_in_call: bool = False  # something else than a step is done, which counts as work
    has_work: bool = False
    num_prompt_tokens: int = 0  # of requests that were added
    num_generated_tokens: int = 0
    num_finished: int = 0
    scheduler: SchedulerStats | None = None  # None while nothing is loaded


class StatsSnapshot:
    """The latest figures of the loop: replaced whole by the engine thread, read by anybody."""

    def __init__(self) -> None:
        self._stats = LoopStats()
        self._progressed_at = float("-inf")

    def post(self, stats: LoopStats) -> None:
        """Replace what is read."""
        self._stats = stats

    def note_progress(self, now: float) -> None:
        """The step that runs goes on, in pace with other engines'; for the thread that runs it."""
        self._progressed_at = now

    def read(self) -> LoopStats:
        """The figures as they were posted last; a step counts from where it was seen to go on."""
        stats, progressed_at = self._stats, self._progressed_at
        started_at = stats.step_started_at
        if started_at is None or stats.is_in_call or progressed_at <= started_at:
            return stats
        return replace(stats, step_started_at=progressed_at)


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Content of one group of layers that cannot be found any more."""

    block_hashes: list[bytes]
    group: int


@dataclass(frozen=True, slots=True)
class AllBlocksRemoved:
    """Nothing can be found any more."""


KVEvent = StoredBlocks | RemovedBlocks | AllBlocksRemoved


def part_of(stored: StoredBlocks, first: int, end: int) -> StoredBlocks:
    """The blocks of a run from `first` to `end`."""
    hashes, size = stored.block_hashes, stored.block_size
    if first == 0 and end == len(hashes):
        return stored
    parent_hash = hashes[first - 1] if first else stored.parent_hash
    token_ids = stored.token_ids[first * size : end * size]
    return StoredBlocks(hashes[first:end], parent_hash, token_ids, size, stored.group)


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """Changes of the prefix cache, in order. `seq` counts batches from 1, without gaps."""

    seq: int
    events: Sequence[KVEvent]
    num_blocks: int  # that the events tell of


@dataclass(slots=True, eq=False)
class KVEventReader:
    """Where one who follows the log stands: all that is kept for it, so one that waits costs nothing."""

    seq: int  # of the last batch it has taken
    wake: Callable[[], None]
    is_woken: bool = False


class KVEventLog:
    """The latest batches for any number of readers, each at its own pace, and what all batches add up to.

    A reader that stays behind for so long that its next batch is dropped has lost its place for good.
    """

    def __init__(self, *, max_batches: int, max_blocks: int) -> None:
        self._max_batches = max_batches
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._batches: deque[KVEventBatch] = deque()
        self._num_blocks = 0  # in these batches
        self._seq = 0
        self._cached: dict[tuple[bytes, int], StoredBlocks] = {}  # single blocks, by hash and group
        self._readers: set[KVEventReader] = set()

    def publish(self, events: Sequence[KVEvent], num_blocks: int) -> None:
        """Append a batch, which nobody changes any more, and wake whoever has taken all before it."""
        with self._lock:
            self._seq += 1
            for event in events:
                self._apply(event)
            self._batches.append(KVEventBatch(self._seq, events, num_blocks))
            self._num_blocks += num_blocks
            # The newest stays, whatever its size, or nobody could follow.
            while len(self._batches) > 1 and (
                len(self._batches) > self._max_batches or self._num_blocks > self._max_blocks
            ):
                self._num_blocks -= self._batches.popleft().num_blocks
            for reader in self._readers:
                if not reader.is_woken:
                    reader.is_woken = True
                    reader.wake()

    def open(self, seq: int, wake: Callable[[], None]) -> KVEventReader | None:
        """Begin to read behind batch `seq`; None where that is no place to go on from."""
        reader = KVEventReader(seq, wake)
        with self._lock:
            if not self._first_seq <= seq <= self._seq:
                return None
            self._readers.add(reader)
        return reader

    def open_with_snapshot(self, wake: Callable[[], None]) -> tuple[KVEventReader, list[StoredBlocks]]:
        """Begin to read behind the newest batch, with every block that can be found there, one at a time."""
        with self._lock:
            reader = KVEventReader(self._seq, wake)
            self._readers.add(reader)
            return reader, list(self._cached.values())

    def take(self, reader: KVEventReader, max_batches: int) -> list[KVEventBatch] | None:
        """The next batches for `reader`, at most so many; None where it has lost its place."""
        with self._lock:
            reader.is_woken = False
            if reader.seq < self._first_seq:
                return None
            start = reader.seq - self._first_seq
            batches = list(islice(self._batches, start, start + max_batches))
            reader.seq += len(batches)
        return batches

    def has_lost(self, reader: KVEventReader) -> bool:
        """Whether the next batch for `reader` is gone."""
        with self._lock:
            return reader.seq < self._first_seq

    def close(self, reader: KVEventReader) -> None:
        """Wake `reader` no more."""
        with self._lock:
            self._readers.discard(reader)
            # As with an outbox.
            reader.wake = _skip_wake

    @property
    def num_readers(self) -> int:
        """How many follow the log."""
        return len(self._readers)

    @property
    def _first_seq(self) -> int:
        """The batch before the oldest that is kept."""
        return self._batches[0].seq - 1 if self._batches else self._seq

    def _apply(self, event: KVEvent) -> None:
        match event:
            case StoredBlocks():
                for index, block_hash in enumerate(event.block_hashes):
                    self._cached[block_hash, event.group] = part_of(event, index, index + 1)
            case RemovedBlocks():
                for block_hash in event.block_hashes:
                    del self._cached[block_hash, event.group]
            case AllBlocksRemoved():
                self._cached.clear()


def _skip_wake() -> None:
    """Whoever was to be woken has gone."""
