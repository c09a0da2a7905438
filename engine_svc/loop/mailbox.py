"""The only way into and out of the engine thread: commands, outputs, statistics and prefix-cache events.

No method blocks except `Inbox.wait`, which only the engine thread calls. Knows no wire.
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
from engine_svc.core.errors import RequestFailed
from engine_svc.core.extras import Extra
from engine_svc.core.request import FinishReason, InputSegment, Request
from engine_svc.loop.step_output import StepOutput, UnreadSteps, split
from engine_svc.scheduler.stats import SchedulerStats
from triptych_kit.telemetry.metrics import Counts, Distribution

STEP_TIME_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 60,
)  # fmt: skip
# Upper bounds in tokens, as vLLM has them.
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Known from the start, so that each is counted from 0.
_ABORT_CAUSES = (
    "client", "deadline", "stop_string", "slow_consumer", "migrated", "session_lost", "poison", "pause",
    "idle",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Add:
    """Run `request`; its outputs go to `outbox` under `handle`. `deadline_at` is on the engine's clock.

    keeps_outputs: its outputs are kept for a session that may adopt it, until it is given up.
    """

    request: Request
    outbox: Outbox
    handle: int
    deadline_at: float | None = None
    keeps_outputs: bool = False


@dataclass(frozen=True, slots=True)
class Extend:
    """Continue a resumable request, whose turn has ended, with a segment; None: it takes no further input.

    failure: why the request ends instead. Ignored when it has ended already.
    """

    request_id: str
    segment: InputSegment | None
    deadline_at: float | None = None  # of the turn
    failure: RequestFailed | None = None


@dataclass(frozen=True, slots=True)
class CancelTurn:
    """End the turn of a resumable request with its next token. Ignored between two turns."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """Send all outputs of a kept request, past and future, to `outbox` under `handle`."""

    request_id: str
    outbox: Outbox
    handle: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End a request that will not be adopted, if it still runs, and drop its kept outputs."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request from outside; `cause` is for logs. Ignored when it has ended already."""

    request_id: str
    cause: str = "client"


@dataclass(frozen=True, slots=True)
class Note:
    """Pass what a frontend says of a request, which may have ended, to the features."""

    request_id: str
    note: Extra


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rank has done the preparation with this number. failure: why the request cannot be served."""

    number: int
    failure: RequestFailed | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop, even while requests run."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the loop with an error found by another thread."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Call:
    """Run `work` in the engine thread, between two steps. It has to handle its own errors."""

    work: Callable[[], None]


Command = Add | Extend | CancelTurn | Abort | Adopt | GiveUp | Note | Prepared | Stop | Fail | Call


class Inbox:
    """Commands to the engine thread, in order. When it is full, only `Add` is refused.

    Others need no limit of their own: a sender may abort what it has added, note it once, and extend it once
    for each of its turns.
    """

    def __init__(self, max_commands: int) -> None:
        self._max_commands = max_commands
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._woken_by: list[Command] = []  # what ended a wait; of the engine thread

    def put(self, command: Command) -> bool:
        """Enqueue `command` and wake a waiting loop. False if it is an `Add` and the inbox is full."""
        if isinstance(command, Add) and self._commands.qsize() >= self._max_commands:
            return False
        self._commands.put(command)
        return True

    def take(self) -> list[Command]:
        """All queued commands, oldest first; never blocks."""
        commands, self._woken_by = self._woken_by, []
        commands += [self._commands.get() for _ in range(self._commands.qsize())]
        return commands

    def wait(self, timeout_s: float | None) -> None:
        """Wait for a command, at most for the timeout."""
        if not self._woken_by:
            with contextlib.suppress(queue.Empty):
                self._woken_by.append(self._commands.get(timeout=timeout_s))


class Outbox:
    """Queue of steps from the engine thread to one frontend session.

    A slow consumer gets its unread steps merged into one, or into as few as fit into messages. Beyond
    `max_bytes` of unread steps the outbox overflows: it keeps no further ones, and the session has to end.
    """

    def __init__(self, *, max_bytes: int, wake: Callable[[], None]) -> None:
        self._max_bytes = max_bytes
        self._wake = wake
        self._lock = threading.Lock()
        self._unread = UnreadSteps()
        self._rest: deque[StepOutput] = deque()  # of a merged step that was too large for one message
        self._is_closed = False
        self._has_overflowed = False

    def publish(self, output: StepOutput) -> None:
        """Append a step and wake the reader, once until it reads."""
        with self._lock:
            if self._is_closed or self._has_overflowed:
                return
            must_wake = self._unread.is_empty
            self._unread.add(output)
            # A single step is accepted whatever its size: no consumer could have read it earlier.
            self._has_overflowed = not must_wake and self._unread.size_bytes > self._max_bytes
            if must_wake or self._has_overflowed:
                self._wake()

    def take(self) -> StepOutput | None:
        """All unread steps as one, or the next piece of it if no message can hold it; None: there is none."""
        if not self._rest:
            if self._unread.is_empty:
                return None
            with self._lock:
                unread, self._unread = self._unread, UnreadSteps()
            self._rest.extend(split(unread.merged()))
        return self._rest.popleft()

    @property
    def has_unread(self) -> bool:
        """Whether a step, or the rest of one, is unread."""
        return bool(self._rest) or not self._unread.is_empty

    @property
    def num_unread_bytes(self) -> int:
        """The approximate size of unread steps on the wire."""
        return self._unread.size_bytes

    @property
    def has_rest(self) -> bool:
        """Whether a step was read in part."""
        return bool(self._rest)

    def close(self) -> None:
        """Drop unread and future steps. The reader is not woken after this."""
        with self._lock:
            self._is_closed = True
            self._unread = UnreadSteps()
            self._rest.clear()
            # The reader holds the outbox: a cycle that only a full garbage collection would free.
            self._wake = _skip_wake

    @property
    def has_overflowed(self) -> bool:
        """Whether outputs were lost because the consumer was too slow."""
        return self._has_overflowed


@dataclass(frozen=True, slots=True)
class LoopStats:
    """Statistics of the loop at one moment.

    step_started_at: when the call that runs began; else when the oldest step in flight began or the step
    before it ended; None while there is neither.
    """

    step_number: int = 0
    step_started_at: float | None = None
    step_budget_s: float = 0.0  # how long what runs may take
    is_in_call: bool = False  # a call runs between two steps, which counts as work
    has_work: bool = False
    num_prompt_tokens: int = 0  # of requests that were added
    num_generated_tokens: int = 0
    num_finished: int = 0
    scheduler: SchedulerStats | None = None  # None until the model is loaded


class LoopCounts:
    """Counts since the start, to which the engine thread adds in place, and which any thread reads."""

    def __init__(self) -> None:
        self.finished = Counts({(reason.value,): 0 for reason in FinishReason})
        self.aborted = Counts({(cause,): 0 for cause in _ABORT_CAUSES})
        self.step_times = Distribution(STEP_TIME_BUCKETS)
        self.step_tokens = Distribution(STEP_TOKEN_BUCKETS)


class StatsSnapshot:
    """The latest statistics of the loop: replaced whole by the engine thread, read by any thread."""

    def __init__(self) -> None:
        self.counts = LoopCounts()
        self._stats = LoopStats()
        self._progressed_at = float("-inf")

    def post(self, stats: LoopStats) -> None:
        self._stats = stats

    def note_progress(self, now: float) -> None:
        """Note that the running step makes progress together with other engines; for its thread."""
        self._progressed_at = now

    def read(self) -> LoopStats:
        """The statistics posted last; the time of a step counts from its last progress."""
        stats, progressed_at = self._stats, self._progressed_at
        started_at = stats.step_started_at
        if started_at is None or stats.is_in_call or progressed_at <= started_at:
            return stats
        return replace(stats, step_started_at=progressed_at)


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Blocks of one group of layers left the prefix cache."""

    block_hashes: list[bytes]
    group: int


@dataclass(frozen=True, slots=True)
class AllBlocksRemoved:
    """The prefix cache was cleared."""


KVEvent = StoredBlocks | RemovedBlocks | AllBlocksRemoved


def part_of(stored: StoredBlocks, first: int, end: int) -> StoredBlocks:
    """The blocks of a run from index `first` to `end`."""
    hashes, size = stored.block_hashes, stored.block_size
    if first == 0 and end == len(hashes):
        return stored
    parent_hash = hashes[first - 1] if first else stored.parent_hash
    token_ids = stored.token_ids[first * size : end * size]
    return StoredBlocks(hashes[first:end], parent_hash, token_ids, size, stored.group, stored.variant)


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """Changes of the prefix cache, in order. `seq` counts batches from 1, without gaps."""

    seq: int
    events: Sequence[KVEvent]
    num_blocks: int  # in all events together


@dataclass(slots=True, eq=False)
class KVEventReader:
    """The position of one subscriber in the log, and all that the log keeps for it."""

    seq: int  # of the last batch it has read
    wake: Callable[[], None]
    is_woken: bool = False


class KVEventLog:
    """The latest batches for any number of readers, each at its own pace, and the sum of all batches.

    A reader so slow that its next batch was dropped cannot continue.
    """

    def __init__(self, *, max_batches: int, max_blocks: int) -> None:
        self._max_batches = max_batches
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._batches: deque[KVEventBatch] = deque()
        self._num_blocks = 0  # in these batches
        self._seq = 0
        self._cached: dict[tuple[bytes, int], StoredBlocks] = {}  # single blocks by hash and group
        self._readers: set[KVEventReader] = set()

    def publish(self, events: Sequence[KVEvent], num_blocks: int) -> None:
        """Append a batch, which must not change any more, and wake readers that have read all before it."""
        with self._lock:
            self._seq += 1
            for event in events:
                self._apply(event)
            self._batches.append(KVEventBatch(self._seq, events, num_blocks))
            self._num_blocks += num_blocks
            # The newest is kept whatever its size, or no reader could follow.
            while len(self._batches) > 1 and (
                len(self._batches) > self._max_batches or self._num_blocks > self._max_blocks
            ):
                self._num_blocks -= self._batches.popleft().num_blocks
            for reader in self._readers:
                if not reader.is_woken:
                    reader.is_woken = True
                    reader.wake()

    def open(self, seq: int, wake: Callable[[], None]) -> KVEventReader | None:
        """Begin to read after batch `seq`; None if the log cannot continue from there."""
        reader = KVEventReader(seq, wake)
        with self._lock:
            if not self._first_seq <= seq <= self._seq:
                return None
            self._readers.add(reader)
        return reader

    def open_with_snapshot(self, wake: Callable[[], None]) -> tuple[KVEventReader, list[StoredBlocks]]:
        """Begin to read after the newest batch; also every block that is cached there, one by one."""
        with self._lock:
            reader = KVEventReader(self._seq, wake)
            self._readers.add(reader)
            return reader, list(self._cached.values())

    def take(self, reader: KVEventReader, max_batches: int) -> list[KVEventBatch] | None:
        """The next batches for `reader`, at most `max_batches`; None if the next one was dropped."""
        with self._lock:
            reader.is_woken = False
            if reader.seq < self._first_seq:
                return None
            start = reader.seq - self._first_seq
            batches = list(islice(self._batches, start, start + max_batches))
            reader.seq += len(batches)
        return batches

    def has_lost(self, reader: KVEventReader) -> bool:
        """Whether the next batch for `reader` was dropped."""
        with self._lock:
            return reader.seq < self._first_seq

    def close(self, reader: KVEventReader) -> None:
        """Stop waking `reader`."""
        with self._lock:
            self._readers.discard(reader)
            # As in `Outbox.close`.
            reader.wake = _skip_wake

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    @property
    def _first_seq(self) -> int:
        """The number of the batch before the oldest that is kept."""
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
    """The wake function of a reader that has left: does nothing."""
