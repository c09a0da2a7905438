"""Records where the time of steps goes, between a start and a stop, as a trace that browsers show.

Knows no plan and no model. It must be started in the thread whose work is to be recorded.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

logger = logging.getLogger(__name__)

# When a recording ends, torch stops all other threads of the process, for longer the more it holds: 1 to 2 s
# for 100,000 events. A step has tens of events with native kernels, thousands in transformers' own code.
MAX_NUM_STEPS = 100

_NO_RANGE: AbstractContextManager[object] = nullcontext()


class Profiler:
    """One recording at a time. While there is none, a range is one shared object that does nothing.

    Steps beyond max_num_steps are not recorded.
    """

    def __init__(self, *, max_num_steps: int = MAX_NUM_STEPS) -> None:
        self._recording: profile | None = None
        self._max_num_steps = max_num_steps
        self._num_steps = 0  # in the recording, including those that came when it was full
        self._target = Path()
        self._activities: list[ProfilerActivity] = []
        self._num_started = 0

    def range(self, name: str) -> AbstractContextManager[object]:
        """Name the enclosed work in the trace."""
        is_idle = self._recording is None or self._num_steps > self._max_num_steps
        return _NO_RANGE if is_idle else record_function(name)

    def begin_step(self) -> None:
        recording = self._recording
        if recording is None:
            return
        self._num_steps += 1
        if self._num_steps == self._max_num_steps + 1:
            # The file is written at the stop, whose caller expects that to take a while.
            recording.toggle_collection_dynamic(False, self._activities)
            fields = {"num_steps": self._max_num_steps, "file": str(self._target)}
            logger.warning("profile is full", extra=fields)

    def start(self, folder: Path, prefix: str = "engine") -> Path:
        """Start a recording; returns the file that `stop` will write, which only this process uses.

        ValueError if a recording is in progress, OSError if the folder cannot be written to.
        """
        if self._recording is not None:
            raise ValueError(f"the profiler is recording already, for {self._target}")
        if not prefix or prefix != Path(prefix).name:
            raise ValueError(f"prefix is {prefix!r}, it has to be a part of a file name")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to")
        self._num_started += 1
        self._target = folder / f"{prefix}-{os.getpid()}-{self._num_started}.trace.json.gz"
        self._activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            self._activities.append(ProfilerActivity.CUDA)
        recording = profile(activities=self._activities)
        recording.start()
        self._recording, self._num_steps = recording, 0
        logger.info("profiling", extra={"file": str(self._target)})
        return self._target

    def stop(self) -> Path:
        """End the recording and write it; ValueError if there is none."""
        recording = self._recording
        if recording is None:
            raise ValueError("the profiler is not recording")
        self._recording = None
        recording.stop()
        recording.export_chrome_trace(str(self._target))
        logger.info("profiled", extra={"file": str(self._target), "size_bytes": self._target.stat().st_size})
        return self._target
