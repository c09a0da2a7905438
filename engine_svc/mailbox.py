"""The only door of the engine thread: Inbox of commands, Outbox of steps per frontend, Board of figures.

Every method returns at once but `Inbox.wait`, which only the engine thread calls. Knows no wire.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine_svc.request import FinishReason, Request
from engine_svc.scheduler.stats import SchedulerStats

# Below this, unread steps are kept as they are: a reader that is merely busy finds a handful.
_MAX_UNFOLDED_STEPS = 16


@dataclass(frozen=True, slots=True)
class Add:
    """Run `request`; its outputs go to `outbox` under `handle`. `deadline_at` is on the engine's clock."""

    request: Request
    outbox: Outbox
    handle: int
    deadline_at: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request from outside, and why, for people. Ignored when it has ended already."""

    request_id: str
    cause: str = "client"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop, whatever still runs."""


Command = Add | Abort | Stop


class Inbox:
    """Commands into the engine thread, in order. Only ADDs are refused when it is full.

    Aborts need no limit of their own: a sender may abort only what it has added.
    """

    def __init__(self, max_commands: int) -> None:
        self._max_commands = max_commands
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()

    def put(self, command: Command) -> bool:
        """Hand over `command` and wake a parked loop. False where an ADD finds the inbox full."""
        with self._changed:
            if isinstance(command, Add) and len(self._commands) >= self._max_commands:
                return False
            self._commands.append(command)
            self._changed.notify()
        return True

    def take(self) -> list[Command]:
        """Everything that waits, oldest first; never blocks."""
        # Reading the length without the lock is safe: a command missed now is seen at the next look.
        if not self._commands:
            return []
        with self._changed:
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def wait(self, timeout_s: float | None) -> None:
        """Park until a command is there, or until the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands), timeout_s)


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """How the request of one row ended. `stop_token_id` only where a token ended it."""

    row: int
    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(slots=True)
class StepOutput:
    """What one session gets of one or several steps, as parallel columns; no handle occurs twice."""

    step_number: int
    handles: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # all rows' tokens, one after the other
    finished: list[FinishedRow] = field(default_factory=list)
    first: list[tuple[int, int]] = field(
        default_factory=list
    )  # (row, cached tokens) of requests that begin here


class Outbox:
    """Steps of one frontend session on their way out of the engine thread.

    A reader that falls behind finds the unread steps merged into one. Past `max_bytes` of them the
    outbox overflows: it keeps nothing more, and its session has to end.
    """

    def __init__(self, *, max_bytes: int, wake: Callable[[], None]) -> None:
        self._max_bytes = max_bytes
        self._wake = wake
        self._lock = threading.Lock()
        self._unread = UnreadSteps()
        self._is_closed = False
        self._has_overflowed = False

    def publish(self, output: StepOutput) -> None:
        """Leave a step for the reader and wake it, once per time that it comes to look."""
        with self._lock:
            if self._is_closed or self._has_overflowed:
                return
            must_wake = self._unread.is_empty
            self._unread.add(output)
            self._has_overflowed = self._unread.size_bytes > self._max_bytes
            if must_wake or self._has_overflowed:
                self._wake()

    def take(self) -> StepOutput | None:
        """All unread steps as one, or None."""
        if self._unread.is_empty:
            return None
        with self._lock:
            unread, self._unread = self._unread, UnreadSteps()
        return unread.merged()

    def close(self) -> None:
        """Drop what is unread and whatever still comes. After this, nobody is woken any more."""
        with self._lock:
            self._is_closed = True
            self._unread = UnreadSteps()

    @property
    def has_overflowed(self) -> bool:
        """Whether outputs were lost because nobody read them."""
        return self._has_overflowed


class UnreadSteps:
    """Steps that nobody has read yet. Adding one costs what its rows cost, however many wait already."""

    def __init__(self) -> None:
        self.size_bytes = 0  # about what they weigh on the wire
        self._recent: list[StepOutput] = []
        self._tokens: dict[int, list[int]] = {}
        self._finished: dict[int, FinishedRow] = {}
        self._first: dict[int, int] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._recent and not self._tokens

    def add(self, output: StepOutput) -> None:
        """Append `output`, folding older steps together so that their number never grows."""
        self.size_bytes += 12 * len(output.handles) + 4 * len(output.token_ids)
        if len(self._recent) == _MAX_UNFOLDED_STEPS:
            self._fold()
        self._recent.append(output)

    def merged(self) -> StepOutput:
        """One step that says what all say one after the other; it carries the number of the last."""
        if len(self._recent) == 1 and not self._tokens:
            return self._recent[0]
        merged = StepOutput(self._recent[-1].step_number)
        self._fold()
        for row, (handle, token_ids) in enumerate(self._tokens.items()):
            merged.handles.append(handle)
            merged.num_tokens.append(len(token_ids))
            merged.token_ids.extend(token_ids)
            if handle in self._finished:
                merged.finished.append(replace(self._finished[handle], row=row))
            if handle in self._first:
                merged.first.append((row, self._first[handle]))
        return merged

    def _fold(self) -> None:
        for output in self._recent:
            start = 0
            for handle, num_tokens in zip(output.handles, output.num_tokens, strict=True):
                self._tokens.setdefault(handle, []).extend(output.token_ids[start : start + num_tokens])
                start += num_tokens
            self._finished.update((output.handles[row.row], row) for row in output.finished)
            self._first.update((output.handles[row], num_cached) for row, num_cached in output.first)
        self._recent.clear()
        self.size_bytes = sum(12 + 4 * len(token_ids) for token_ids in self._tokens.values())


@dataclass(frozen=True, slots=True)
class Figures:
    """The loop's figures at one moment. `step_started_at` is None while no step is in flight."""

    step_number: int = 0
    step_started_at: float | None = None
    has_work: bool = False
    num_prompt_tokens: int = 0  # of requests that were added
    num_generated_tokens: int = 0
    num_finished: int = 0
    scheduler: SchedulerStats | None = None  # None while nothing is loaded


class Board:
    """The latest figures of the loop: replaced whole by the engine thread, read by anybody."""

    def __init__(self) -> None:
        self._figures = Figures()

    def post(self, figures: Figures) -> None:
        """Replace what is read."""
        self._figures = figures

    def read(self) -> Figures:
        """The figures as they were posted last."""
        return self._figures
