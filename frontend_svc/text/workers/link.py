"""The process of one text worker and the connection to it, on the event loop.

Knows frames, but neither their meaning nor queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from frontend_svc.text.workers.frames import Frame, FrameError, FrameReader, pack_head
from triptych_kit.process.child import Child
from triptych_kit.process.setup import importing_environment

logger = logging.getLogger(__name__)

WORKER_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "frontend_svc.text.workers.process")

# Bytes handed to the transport's buffer at once: the rest waits until the worker has read them.
_CHUNK_BYTES = 64 * 1024
# Indexes of fields in /proc/PID/stat, counted after the program name.
_USER_TIME, _SYSTEM_TIME = 11, 12
# Token streams of running requests have priority over new prompts.
_NICENESS = 5
# Without root, the kernel allows one change of an autogroup's priority per 100 ms, system-wide.
_NEXT_TRY_S = 0.15
_MAX_TRIES = 100


class WorkerLink(asyncio.Protocol):
    """One worker process, connected by its standard input and output. All runs on the event loop.

    on_frame: called for each answer.  on_end: called once, when the process can no longer answer.
    """

    def __init__(
        self,
        command: Sequence[str],
        on_frame: Callable[[WorkerLink, Frame], None],
        on_end: Callable[[WorkerLink], None],
    ) -> None:
        """Start the process. Raises OSError."""
        self._on_frame = on_frame
        self._on_end = on_end
        self._reader = FrameReader()
        self._unsent: list[memoryview] = []
        self._is_paused = False
        self._has_ended = False
        self._transport: asyncio.Transport | None = None
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._child = Child(
                    "text-worker",
                    command,
                    _environment(),
                    stdin=theirs,
                    stdout=theirs,
                    start_new_session=True,
                )
        except OSError:
            self._socket.close()
            raise
        self.exited = asyncio.ensure_future(self._child.wait())
        self._lower_priority()

    async def connect(self) -> None:
        """Has to be called before anything is sent."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)

    @property
    def process_id(self) -> int:
        return self._child.pid

    def cpu_s(self) -> float:
        """CPU seconds that the process has used; infinite if the system does not report them."""
        try:
            with open(f"/proc/{self.process_id}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return math.inf
        return (int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])) / os.sysconf("SC_CLK_TCK")

    def send(self, header: Mapping[str, object], parts: Sequence[bytes]) -> None:
        """Write a frame with `parts` as its body, as fast as the worker reads it. Raises FrameError."""
        head = pack_head(header, sum(len(part) for part in parts))
        # Short frames are written in one piece.
        if sum(len(part) for part in parts) <= _CHUNK_BYTES:
            head, parts = b"".join((head, *parts)), ()
        self._unsent += [memoryview(part) for part in (head, *parts) if part]
        self._pump()

    def kill(self) -> None:
        """Kill the process. After that only `on_end` is called."""
        self._child.kill()

    def close(self) -> None:
        """End the process by closing the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        # The transports of other event loops have the same methods without being subclasses.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop: the process has written."""
        self._reader.feed(data)
        try:
            while not self._has_ended and (frame := self._reader.take()) is not None:
                self._on_frame(self, frame)
        except FrameError as error:
            logger.error(
                "text worker violates its protocol",
                extra={"process_id": self.process_id, "error": str(error)},
            )
            self.kill()
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop: the process has exited or closed the connection, and is unusable."""
        self._end()

    def pause_writing(self) -> None:
        """Called by the event loop: the write buffer is full."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Called by the event loop: the write buffer has room."""
        self._is_paused = False
        self._pump()

    def _lower_priority(self) -> None:
        # Set at once and by the parent: starting Python and loading a tokenizer take longer than most tasks.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.process_id, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        self._lower_session(_MAX_TRIES)

    def _lower_session(self, num_tries: int) -> None:
        # With autogroups, Linux shares CPU time between sessions first, and a worker is its own session: its
        # nice value then has no effect on other sessions.
        try:
            Path(f"/proc/{self.process_id}/autogroup").write_text(str(_NICENESS))
        except BlockingIOError:
            if num_tries > 1 and not self._has_ended:
                asyncio.get_running_loop().call_later(_NEXT_TRY_S, self._lower_session, num_tries - 1)
        except OSError:
            # The process has ended, or this system has no autogroups.
            return

    def _pump(self) -> None:
        while self._unsent and not self._is_paused and self._transport is not None:
            view = self._unsent[0]
            self._transport.write(bytes(view[:_CHUNK_BYTES]))
            if len(view) > _CHUNK_BYTES:
                self._unsent[0] = view[_CHUNK_BYTES:]
            else:
                self._unsent.pop(0)

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._unsent.clear()
            self._on_end(self)


def _environment() -> dict[str, str]:
    return {
        **importing_environment(),
        # One thread per worker: there is one worker per core.
        "TOKENIZERS_PARALLELISM": "false",
        # A panic of the tokenizer takes one line in the log, not fifty.
        "RUST_BACKTRACE": "0",
    }
