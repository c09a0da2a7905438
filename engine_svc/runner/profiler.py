"""Records where the time of steps goes, between a start and a stop, as a trace that browsers show.

Knows no plan and no model. Whoever starts it is in the thread whose work is to be seen.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

logger = logging.getLogger(__name__)

_NO_RANGE: AbstractContextManager[object] = nullcontext()


class Profiler:
    """One recording at a time. While there is none, a range is one shared object that does nothing."""

    def __init__(self) -> None:
        self._recording: profile | None = None
        self._target = Path()
        self._num_started = 0

    @property
    def is_recording(self) -> bool:
        """Whether a start has not been stopped yet."""
        return self._recording is not None

    def range(self, name: str) -> AbstractContextManager[object]:
        """Names, in the trace, what is done inside."""
        return _NO_RANGE if self._recording is None else record_function(name)

    def start(self, folder: Path, prefix: str = "engine") -> Path:
        """Begin to record; returns where `stop` will write, a file of this process alone.

        ValueError where a recording is under way, OSError where the folder cannot be written to.
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
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        recording = profile(activities=activities)
        recording.start()
        self._recording = recording
        logger.info("profiling", extra={"file": str(self._target)})
        return self._target

    def stop(self) -> Path:
        """End the recording and write it; ValueError where there is none."""
        recording = self._recording
        if recording is None:
            raise ValueError("the profiler is not recording")
        self._recording = None
        recording.stop()
        recording.export_chrome_trace(str(self._target))
        logger.info("profiled", extra={"file": str(self._target), "size_bytes": self._target.stat().st_size})
        return self._target
