"""Ends a process whose step hangs, and before that writes down where all threads stand. Knows no wire."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial

from engine_svc.loop.mailbox import LoopStats, StatsSnapshot
from service_kit.clock import Clock
from service_kit.stacks import write_beside, write_stacks

logger = logging.getLogger(__name__)

# As sysexits.h has it: an error of the system below, e.g. a device that does not answer.
EXIT_HUNG = 71
_TICK_S = 0.25
# While nothing runs. What begins meanwhile is seen that much later, and an idle process stays idle.
_IDLE_TICKS = 4
# For the log and the stacks, before anybody is told: they should be there when the process ends in order.
_WRITE_S = 1.0
# For who is told to end the process in order; then it is ended at once. With the default limit of a step, and
# the time to see that it is passed and to write, the process is gone within 10 s.
_GRACE_S = 3.0


class StepWatch:
    """Adds up how long the present step has been seen to run.

    It goes by its own looks and not by the step's start: while the process is stopped, nobody looks, and no
    step runs.
    """

    def __init__(self, limit_s: float, tick_s: float = _TICK_S) -> None:
        self._limit_s = limit_s
        self._longest_tick_s = 2 * tick_s
        self._looked_at: float | None = None
        self._step: tuple[int, float | None] = (0, None)
        self._seen_s = 0.0

    def look(self, stats: LoopStats, now: float) -> float | None:
        """For how long the step has been running, where that is too long; else None."""
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, self._longest_tick_s)
        self._looked_at = now
        step = (stats.step_number, stats.step_started_at)
        if stats.step_started_at is None or step != self._step:
            self._step, self._seen_s = step, 0.0
            return None
        self._seen_s += passed_s
        return self._seen_s if self._seen_s > max(self._limit_s, stats.step_budget_s or 0.0) else None


class Watchdog:
    """Looks at the board from a thread of its own: neither the loop nor the event loop can hold it up.

    on_hang: told the reason, in the watchdog's thread; it has to bring the process to its end, or this does.
    """

    def __init__(
        self,
        stats_snapshot: StatsSnapshot,
        clock: Clock,
        on_hang: Callable[[str], None],
        *,
        limit_s: float,
        tick_s: float = _TICK_S,
        grace_s: float = _GRACE_S,
        dump_stacks: Callable[[], None] = write_stacks,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._stats_snapshot = stats_snapshot
        self._clock = clock
        self._on_hang = on_hang
        self._watch = StepWatch(limit_s, tick_s)
        self._tick_s = tick_s
        self._grace_s = grace_s
        self._dump_stacks = dump_stacks
        self._end_process = end_process
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; may be called again, and before `start`."""
        self._is_over.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until it looks no more; False where it still does."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        tick_s = self._tick_s
        while not self._is_over.wait(tick_s):
            stats = self._stats_snapshot.read()
            tick_s = self._tick_s * (_IDLE_TICKS if stats.step_started_at is None else 1)
            seen_s = self._watch.look(stats, self._clock.now())
            if seen_s is not None:
                self._bite(stats, seen_s)
                return

    def _bite(self, stats: LoopStats, seen_s: float) -> None:
        what = f"step {stats.step_number}"
        if stats.is_in_call:
            what = f"a call behind {what}"
        try:
            # What hangs may be who reads it.
            write_beside(partial(self._write_down, stats, seen_s), _WRITE_S)
            self._on_hang(f"{what} has been running for {seen_s:.1f} s: it hangs")
        finally:
            # Whatever could not be done: the process ends.
            if not self._is_over.wait(self._grace_s):
                self._end_process(EXIT_HUNG)

    def _write_down(self, stats: LoopStats, seen_s: float) -> None:
        logger.critical(
            "the engine thread hangs",
            extra={
                "step_number": stats.step_number,
                "is_in_call": stats.is_in_call,
                "seconds": round(seen_s, 1),
                "budget_s": stats.step_budget_s,
            },
        )
        self._dump_stacks()
