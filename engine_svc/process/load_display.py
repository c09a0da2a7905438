"""Shows the progress of loading: a bar below the log on a terminal, else messages. Knows no model."""

from __future__ import annotations

import contextlib
import logging
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine_svc.core.facts import LoadProgress
from triptych_kit.clock import Clock
from triptych_kit.telemetry.logs import ERASE_LINE

# A model that loads faster than this is not logged.
_MIN_INTERVAL_S = 0.5

logger = logging.getLogger(__name__)


class LoadDisplay:
    """Called on the thread that loads."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._bar: Progress | None = None
        self._phase = ""
        self._logged_tenths = 0
        self._clock = clock
        self._quiet_until = clock.now() + _MIN_INTERVAL_S
        if stream.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
            )
            # Refreshed explicitly: rich's refresh thread would outlive an error in loading.
            self._bar = Progress(*columns, console=Console(file=stream), auto_refresh=False, transient=True)

    def show(self, progress: LoadProgress) -> None:
        """Draw `progress`, or log it if it has advanced by a tenth."""
        is_new_phase = progress.phase != self._phase
        tenths = 10 * progress.done // progress.total if progress.total else 0
        if is_new_phase:
            self._phase, self._logged_tenths = progress.phase, 0
        if self._bar is not None:
            # The terminal may have been closed.
            with contextlib.suppress(OSError):
                self._draw(self._bar, progress, is_new_phase=is_new_phase)
        elif tenths > self._logged_tenths and self._clock.now() >= self._quiet_until:
            self._logged_tenths, self._quiet_until = tenths, self._clock.now() + _MIN_INTERVAL_S
            logger.info("loading", extra={"phase": progress.phase, "percent": 10 * tenths})

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def _draw(self, bar: Progress, progress: LoadProgress, *, is_new_phase: bool) -> None:
        if not bar.task_ids:
            # A line without an end may have been left for what comes next.
            bar.console.file.write(ERASE_LINE)
            bar.start()
            bar.add_task(progress.phase)
        [task] = bar.task_ids
        if is_new_phase:
            bar.reset(task, description=progress.phase, total=progress.total or None)
        bar.update(task, completed=progress.done, refresh=True)
