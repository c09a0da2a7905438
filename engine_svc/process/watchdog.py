"""Ends the process if a step exceeds its budget, after writing the stacks of all threads to the log.

Knows no wire.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial

from engine_svc.loop.mailbox import LoopStats, StatsSnapshot
from triptych_kit.clock import Clock, StallTimer
from triptych_kit.process.stacks import write_beside, write_stacks

logger = logging.getLogger(__name__)

# As in sysexits.h: a system error, e.g. a device that does not respond.
EXIT_HUNG = 71
_TICK_S = 0.25
# Check interval in ticks while no step runs. A step is noticed that much later; an idle process stays idle.
_IDLE_TICKS = 4
# Time for the log and the stacks before `on_hang` is called: they should be complete when the process ends.
_WRITE_S = 1.0
# Time for `on_hang` to end the process in order; then it is ended at once. With the default step limit, and
# the time to detect the hang and to write, the process is gone within 10 s.
_GRACE_S = 3.0


class Watchdog:
    """Checks the statistics on its own thread, which neither the engine loop nor the event loop can block.

    on_hang: called with the reason on the watchdog's thread; has to end the process within `grace_s`, or the
    watchdog does.
    """

    def __init__(
        self,
        stats_snapshot: StatsSnapshot,
        clock: Clock,
        on_hang: Callable[[str], None],
        *,
        tick_s: float = _TICK_S,
        grace_s: float = _GRACE_S,
        dump_stacks: Callable[[], None] = write_stacks,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._stats_snapshot = stats_snapshot
        self._clock = clock
        self._on_hang = on_hang
        self._step = StallTimer(tick_s)
        self._tick_s = tick_s
        self._grace_s = grace_s
        self._dump_stacks = dump_stacks
        self._end_process = end_process
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """May be called repeatedly, and before `start`."""
        self._is_over.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; returns False if it still runs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def hung_for_s(self, stats: LoopStats) -> float | None:
        """How long the step has been seen running if that exceeds its budget, else None."""
        seen_s = self._step.look((stats.step_number, stats.step_started_at), self._clock.now())
        return seen_s if stats.step_started_at is not None and seen_s > stats.step_budget_s else None

    def _run(self) -> None:
        tick_s = self._tick_s
        while not self._is_over.wait(tick_s):
            stats = self._stats_snapshot.read()
            tick_s = self._tick_s * (_IDLE_TICKS if stats.step_started_at is None else 1)
            seen_s = self.hung_for_s(stats)
            if seen_s is not None:
                self._bite(stats, seen_s)
                return

    def _bite(self, stats: LoopStats, seen_s: float) -> None:
        what = f"step {stats.step_number}"
        if stats.is_in_call:
            what = f"a call after {what}"
        try:
            # In another thread: the reader of this process's output may be what hangs.
            write_beside(partial(self._write_down, stats, seen_s), _WRITE_S)
            self._on_hang(f"{what} has been running for {seen_s:.1f} s: it hangs")
        finally:
            # The process ends even if the above failed.
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
