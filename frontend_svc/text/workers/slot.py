"""One slot of the worker pool: its process, the present task with its time limit, and restarts.

Knows no queue and no other slot.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections.abc import Callable, Mapping, Sequence

from frontend_svc.text.tokenize.text_files import TextFiles
from frontend_svc.text.workers.frames import Frame, FrameError
from frontend_svc.text.workers.link import WorkerLink
from frontend_svc.text.workers.work_queue import Work
from triptych_kit.errors import InvalidArgument, InvalidTransition, ServiceError
from triptych_kit.shares import SLOW_S

logger = logging.getLogger(__name__)

# A large vocabulary takes a second or two to parse, on a busy machine several times that.
_READ_LIMIT_S = 60.0
# A worker that got less than this share of a core was held up by processes of higher priority.
_FAIR_SHARE = 0.25
_MAX_LIMITS = 4
_MAX_MODELS = 64
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_MAX_DOUBLINGS = 6
_MAX_FAILURES_IN_A_ROW = 3


class SlotState(enum.Enum):
    """State of a slot's process."""

    DOWN = "down"
    STARTING = "starting"
    IDLE = "idle"
    READING = "reading"
    WORKING = "working"
    CLOSED = "closed"


_TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.DOWN: frozenset({SlotState.STARTING, SlotState.CLOSED}),
    SlotState.STARTING: frozenset({SlotState.IDLE, SlotState.DOWN, SlotState.CLOSED}),
    SlotState.IDLE: frozenset({SlotState.READING, SlotState.WORKING, SlotState.DOWN, SlotState.CLOSED}),
    SlotState.READING: frozenset({SlotState.WORKING, SlotState.IDLE, SlotState.DOWN, SlotState.CLOSED}),
    SlotState.WORKING: frozenset({SlotState.IDLE, SlotState.DOWN, SlotState.CLOSED}),
    SlotState.CLOSED: frozenset({SlotState.CLOSED}),
}


class WorkerSlot:
    """Runs one task at a time in a process that it starts, kills at a time limit, and replaces.

    A task whose process got less than a quarter of a core gets the time limit again, up to four times in all.
    After a time limit the process is replaced at once. If processes die by themselves, it is replaced with a
    growing delay of up to 5 s.

    on_free: called when the slot can take a task.  on_end: called first with each task that it has ended
    with, in whatever way.  on_lost: called then with a task whose worker died.
    """

    def __init__(
        self,
        command: Sequence[str],
        time_limit_s: float,
        *,
        on_free: Callable[[], None],
        on_end: Callable[[Work], None],
        on_lost: Callable[[Work], None],
    ) -> None:
        self._command = command
        self._time_limit_s = time_limit_s
        self._on_free = on_free
        self._on_end = on_end
        self._on_lost = on_lost
        self._state = SlotState.DOWN
        self._link: WorkerLink | None = None
        self._links: set[WorkerLink] = set()
        self._work: Work | None = None
        self._reading: TextFiles | None = None
        # Least recently used first.
        self._loaded: dict[str, None] = {}
        self._unreadable: set[str] = set()
        self._limit: _TimeLimit | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None
        self._num_failures = 0

    @property
    def process_id(self) -> int:
        """0 while there is no process."""
        return self._link.process_id if self._link is not None else 0

    @property
    def is_free(self) -> bool:
        """Whether it can begin a task."""
        return self._state is SlotState.IDLE

    @property
    def is_busy_long(self) -> bool:
        """Whether it loads files or runs a long task."""
        is_long = self._work is not None and self._work.is_long
        return self._state is SlotState.READING or (self._state is SlotState.WORKING and is_long)

    @property
    def is_failing(self) -> bool:
        """Whether several processes have died in a row, and none runs now."""
        is_down = self._state in (SlotState.DOWN, SlotState.STARTING)
        return is_down and self._num_failures >= _MAX_FAILURES_IN_A_ROW

    def has_read(self, files: TextFiles) -> bool:
        """Whether its process has loaded `files`."""
        return files.key in self._loaded

    def may_read(self, files: TextFiles) -> bool:
        """Whether its process has neither loaded `files` nor failed to."""
        return files.key not in self._loaded and files.key not in self._unreadable

    def start(self) -> None:
        """Start a process, unless there is one or a restart is scheduled."""
        if self._state is SlotState.DOWN and self._restart is None:
            self._move_to(SlotState.STARTING)
            self._starting = asyncio.get_running_loop().create_task(self._start())

    def begin(self, work: Work) -> None:
        """Start `work`. The slot must be free."""
        work.num_attempts += 1
        self._work = work
        files = work.files
        if files is not None and not self.has_read(files):
            self._read(files)
            return
        if files is not None:
            self._loaded[files.key] = self._loaded.pop(files.key)
        self._send_work(work)

    def read_ahead(self, models: Mapping[str, TextFiles]) -> None:
        """Load the files of one of `models` that its process has not loaded yet, if there is one."""
        for files in models.values():
            if self.may_read(files):
                self._read(files)
                return

    def close(self, error: ServiceError) -> None:
        """End the process: close the pipe of an idle one, kill a busy one and fail its task."""
        is_idle = self._state is SlotState.IDLE
        self._move_to(SlotState.CLOSED)
        for timer in (self._limit, self._restart):
            if timer is not None:
                timer.cancel()
        if self._work is not None:
            self._work.fail(error)
        if self._link is not None:
            self._link.close() if is_idle else self._link.kill()

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait until no process is left; those that do not end within `timeout_s` are killed."""
        if self._starting is not None:
            await self._starting
        ends = [link.exited for link in self._links]
        if not ends:
            return
        _, pending = await asyncio.wait(ends, timeout=timeout_s)
        if pending:
            for link in self._links:
                link.kill()
            await asyncio.wait(pending, timeout=timeout_s)

    async def _start(self) -> None:
        try:
            link = self._link = WorkerLink(self._command, self._answered, self._ended)
        except OSError as error:
            logger.error("text worker cannot be started", extra={"error": str(error)})
            self._ended(None)
            return
        self._links.add(link)
        link.exited.add_done_callback(lambda _: self._links.discard(link))
        await link.connect()
        if self._state is SlotState.CLOSED:
            link.kill()
        elif self._link is link:
            self._move_to(SlotState.IDLE)
            self._on_free()

    def _read(self, files: TextFiles) -> None:
        self._move_to(SlotState.READING)
        self._reading = files
        forgotten = ""
        if len(self._loaded) >= _MAX_MODELS:
            forgotten = next(iter(self._loaded))
            del self._loaded[forgotten]
        header = {
            "verb": "load",
            "forgotten": forgotten,
            "num_tokenizer_bytes": len(files.tokenizer),
            "num_config_bytes": len(files.tokenizer_config),
        }
        self._send(header, files, files.parts, _READ_LIMIT_S)

    def _send_work(self, work: Work) -> None:
        self._move_to(SlotState.WORKING)
        work.began_at, work.cpu_s = asyncio.get_running_loop().time(), math.inf
        self._send(work.header, work.files, (work.body,), self._time_limit_s)

    def _send(
        self, header: Mapping[str, object], files: TextFiles | None, parts: Sequence[bytes], limit_s: float
    ) -> None:
        assert self._link is not None
        self._limit = _TimeLimit(self._link, limit_s, self._expire)
        key = "" if files is None else files.key
        self._link.send({**header, "key": key, "limit_s": _MAX_LIMITS * limit_s}, parts)

    def _answered(self, link: WorkerLink, frame: Frame) -> None:
        if link is not self._link:
            return
        if self._limit is not None:
            self._limit.cancel()
        self._num_failures = 0
        if self._state is SlotState.READING:
            self._take_read(frame)
        elif self._state is SlotState.WORKING:
            self._settle(frame)
        elif self._state is not SlotState.CLOSED:
            raise FrameError("received an answer without a request")

    def _take_read(self, frame: Frame) -> None:
        files, self._reading = self._reading, None
        assert files is not None
        if "refused" in frame.header:
            self._unreadable.add(files.key)
            self._settle(frame)
            return
        self._loaded[files.key] = None
        if self._work is None:
            self._settle(frame)
        else:
            self._send_work(self._work)

    def _settle(self, frame: Frame) -> None:
        work = self._end_work()
        if work is not None and not work.answer.done():
            work.answer.set_result(frame)
        self._move_to(SlotState.IDLE)
        self._on_free()

    def _expire(self, limit_s: float) -> None:
        link, work = self._link, self._end_work()
        assert link is not None
        logger.warning(
            "text worker killed at its time limit",
            extra={"process_id": link.process_id, "limit_s": limit_s, "state": self._state.value},
        )
        if work is not None:
            work.fail(_time_limit_error(work.field, limit_s))
        if work is None and self._reading is not None:
            self._unreadable.add(self._reading.key)
        self._leave()
        link.kill()
        self.start()

    def _ended(self, link: WorkerLink | None) -> None:
        if link is not self._link or self._state is SlotState.CLOSED:
            return
        work, process_id = self._end_work(), self.process_id
        self._leave()
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** min(self._num_failures, _MAX_DOUBLINGS))
        self._num_failures += 1
        logger.warning(
            "text worker died",
            extra={"process_id": process_id, "restart_in_s": delay_s, "in_a_row": self._num_failures},
        )
        self._restart = asyncio.get_running_loop().call_later(delay_s, self._start_again)
        if work is not None:
            self._on_lost(work)

    def _start_again(self) -> None:
        self._restart = None
        self.start()

    def _end_work(self) -> Work | None:
        work, self._work = self._work, None
        if work is not None:
            if self._limit is not None and asyncio.get_running_loop().time() - work.began_at > SLOW_S:
                work.cpu_s = self._limit.cpu_s()
            self._on_end(work)
        return work

    def _leave(self) -> None:
        """Detach from the process: its further answers are ignored."""
        if self._limit is not None:
            self._limit.cancel()
        self._link, self._reading = None, None
        self._loaded.clear()
        self._move_to(SlotState.DOWN)

    def _move_to(self, state: SlotState) -> None:
        if state not in _TRANSITIONS[self._state]:
            raise InvalidTransition(f"a text worker cannot go from {self._state.value} to {state.value}")
        self._state = state


class _TimeLimit:
    """Calls `on_expired` after `limit_s`, or up to four times that while the process gets too little CPU."""

    def __init__(self, link: WorkerLink, limit_s: float, on_expired: Callable[[float], None]) -> None:
        self._link = link
        self._limit_s = limit_s
        self._on_expired = on_expired
        self._num_limits = 1
        self._cpu_before_s = link.cpu_s()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._expire)

    def cancel(self) -> None:
        self._timer.cancel()

    def cpu_s(self) -> float:
        """CPU seconds of the process since the beginning; infinite if the system does not report them."""
        now_s = self._link.cpu_s()
        return now_s if math.isinf(now_s) else now_s - self._cpu_before_s

    def _expire(self) -> None:
        if self._num_limits < _MAX_LIMITS and self.cpu_s() < _FAIR_SHARE * self._limit_s:
            self._num_limits += 1
            self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._expire)
        else:
            self._on_expired(self._limit_s)


def _time_limit_error(field: str, limit_s: float) -> InvalidArgument:
    return InvalidArgument(
        f"{field} took longer than the limit of {limit_s:g} s to be processed",
        field=field,
        reason="TEXT_TIME_LIMIT",
        metadata={"limit_s": f"{limit_s:g}"},
    )
