"""The file of a trace, written by a thread of its own: no slow or failing disk holds up the loop."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from engine_svc.features.sched_trace.records import Record, encode
from triptych_kit.config import ConfigError

logger = logging.getLogger(__name__)

# Size of a file, over all runs that it has.
MAX_BYTES = 4 << 30
# What waits to be written, in ids and tokens: some ten MB.
MAX_QUEUED_ITEMS = 1 << 20
# How long the end of the engine waits for the disk: the process gives its thread a second in all.
CLOSE_LIMIT_S = 0.25


def file_of(path: str, index: int) -> Path:
    """The file of the engine with this index: engines of one host have the same options."""
    file = Path(path)
    return file.with_name(f"{file.stem}-{index}{file.suffix}") if index else file


class TraceFile:
    """Appends records to a file until it is closed.

    After an error or at a limit it takes no more, and says so in one warning. What was written up to there
    can be replayed.
    """

    def __init__(
        self, path: Path, *, max_bytes: int = MAX_BYTES, max_queued_items: int = MAX_QUEUED_ITEMS
    ) -> None:
        self.is_open = True
        self._path = path
        self._stream, self._num_bytes = _open(path)
        self._max_bytes = max_bytes
        self._max_queued_items = max_queued_items
        self._queue: SimpleQueue[tuple[Callable[[], Sequence[Record]], int] | None] = SimpleQueue()
        self._num_items_put = 0
        self._num_items_written = 0
        self._ending = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, make_records: Callable[[], Sequence[Record]], num_items: int) -> None:
        """Have records made and written. num_items: how many ids and tokens wait for that meanwhile."""
        if not self.is_open:
            return
        if self._num_items_put - self._num_items_written > self._max_queued_items:
            self._end("the disk is slower than the engine")
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="sched-trace", daemon=True)
            self._thread.start()
        self._num_items_put += num_items
        self._queue.put((make_records, num_items))

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Wait until all is written, but not for long."""
        if self._thread is None:
            self._stream.close()
            return
        self._queue.put(None)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._end(f"at the end of the engine the disk took longer than {limit_s:g} s")
        self.is_open = False

    def _write(self) -> None:
        try:
            with self._stream:
                while (item := self._queue.get()) is not None:
                    self._write_records(*item)
        except (OSError, LookupError, TypeError, ValueError) as error:
            self._end(str(error))
            while not self._queue.empty():
                self._queue.get()

    def _write_records(self, make_records: Callable[[], Sequence[Record]], num_items: int) -> None:
        for record in make_records():
            self._num_bytes += self._stream.write(encode(record).encode() + b"\n")
        if self._queue.empty():
            self._stream.flush()
        self._num_items_written += num_items
        if self._num_bytes > self._max_bytes:
            raise OSError(f"the file has reached its limit of {self._max_bytes} bytes")

    def _end(self, reason: str) -> None:
        with self._ending:
            was_open, self.is_open = self.is_open, False
        if was_open:
            self._queue.put(None)
            logger.warning("sched_trace stopped", extra={"path": str(self._path), "reason": reason})


def _open(path: Path) -> tuple[BinaryIO, int]:
    """Open a file to append whole lines, and its size. Raises ConfigError, also if another engine has it."""
    try:
        # Prompts are in it.
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # The last engine was killed within a line.
                size += os.write(descriptor, b"\n")
            return os.fdopen(descriptor, "wb"), size
        except BaseException:
            os.close(descriptor)
            raise
    except BlockingIOError as error:
        raise ConfigError(f"--sched-trace-path: another engine writes to {path}") from error
    except OSError as error:
        raise ConfigError(f"--sched-trace-path: {path} cannot be written: {error.strerror}") from error
