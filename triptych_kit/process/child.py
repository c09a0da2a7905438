"""One child process: started, announced, followed, stopped. Knows no reason to start or to stop one.

Works with an event loop (`wait`, `stop`, `announced`) and without one (`end_fd`, `join`, `kill`). Never forks
Python: a copy of the state of gRPC's threads would not work.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any

from triptych_kit.telemetry.logs import (
    COPIED_TO_TERMINAL,
    is_below_warning,
    is_shown_on_terminal,
    write_log_line,
)

_NUM_LAST_LINES = 20
_MAX_HELD_LINES = 1000
# Limit of one line of a child's log.
_MAX_LINE_BYTES = 64 * 1024
# How a service announces what ends it: a line of its own on stderr, not a log message.
_CAUSE = re.compile(r"triptych [a-z]+: (.+)")

# The time of death in messages of `ChildDied`.
STARTING = "while it was starting"


class Output(Enum):
    """Where a child's output goes."""

    INHERITED = "inherited"
    COPIED = "copied"  # to our stderr, with the child's name; the last lines are kept
    KEPT = "kept"  # the last lines alone


@dataclass(frozen=True, slots=True)
class Announcement:
    """The addresses that a child has announced.

    admin_addresses: of its workers, if it has several.
    """

    pid: int
    address: str
    admin_address: str
    admin_http: str = ""
    http: str = ""
    admin_addresses: tuple[str, ...] = ()


class ChildDied(Exception):
    """A child ended unexpectedly. The message ends with the cause that it announced, or with its last line.

    Without an announced cause, its lines before that come first, unless they were copied.
    exit_code: as a shell reports it, and never 0.  was_starting: it died before it was ready.
    """

    def __init__(self, child: Child, when: str = "") -> None:
        last_lines = [line for line in child.last_lines if line.strip()]
        reason = child.announced_cause or (last_lines.pop() if last_lines else "")
        before = (
            ""
            if child.announced_cause or child.is_copied
            else "".join(f"    {line}\n" for line in last_lines)
        )
        words = [child.name, child.ending, *([when] if when else [])]
        super().__init__(
            (before and f"last lines of {child.name}:\n{before}")
            + " ".join(words)
            + (reason and f": {reason}")
        )
        self.exit_code = child.shell_code or 1
        self.was_starting = when == STARTING


class Child:
    """A running child.

    announces: it gets `--announce-fd`, and `announced` waits for what it writes there.
    options: those of `subprocess.Popen`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        announces: bool = False,
        output: Output = Output.INHERITED,
        pass_fds: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self.announced_cause = ""  # what it announced as the cause of its end
        self.hides_info = False  # log messages below a warning are not copied
        self.is_copied = output is Output.COPIED
        self._held: deque[str] | None = None  # lines to copy at `release`; None: none is held back
        self.announcement: Announcement | None = None
        self._is_terminated = False
        environment = dict(environment)
        if output is not Output.INHERITED:
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            if self.is_copied and is_shown_on_terminal(sys.stderr):
                environment[COPIED_TO_TERMINAL] = "1"
        read_fd, write_fd = os.pipe()
        self._announcing = os.fdopen(read_fd, "rb")
        try:
            self._process = subprocess.Popen(
                [*command, *([f"--announce-fd={write_fd}"] if announces else [])],
                pass_fds=[*pass_fds, *([write_fd] if announces else [])],
                env=environment,
                **{"stdin": subprocess.DEVNULL, **options},
            )
        except BaseException:
            self._announcing.close()
            raise
        finally:
            os.close(write_fd)
        if not announces:
            self._announcing.close()
        stdout = self._process.stdout
        self._copying = None if stdout is None else asyncio.ensure_future(self._copy_lines(stdout))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """The exit code, a signal as a negative number; None while it runs."""
        return self._process.poll()

    @property
    def shell_code(self) -> int:
        """The exit code as a shell reports it; 0 while it runs, and after a SIGTERM that we sent."""
        code = self.exit_code or 0
        if code == -signal.SIGTERM and self._is_terminated:
            return 0
        return 128 - code if code < 0 else code

    @property
    def how_it_ended(self) -> str:
        """The end of the process for messages, without its process id."""
        code = self.exit_code
        return "is running" if code is None else describe_exit(code)

    @property
    def cause(self) -> str:
        """How it ended and, if it exited by itself with an error, why: as announced, else its last line."""
        lines = [line for line in self.last_lines if line.strip()]
        reason = self.announced_cause or (lines[-1] if lines else "")
        has_exited = (self.exit_code or 0) > 0
        return f"{self.how_it_ended}: {reason}" if reason and has_exited else self.how_it_ended

    @property
    def ending(self) -> str:
        """How it ended, for messages."""
        return f"(pid {self.pid}) {self.how_it_ended}"

    async def announced(self) -> Announcement:
        """Wait for its announcement; raises ChildDied if it ends without one."""
        async with _reading(self._announcing) as reader:
            line = await reader.readline()
        if not line:
            await self.wait()
            raise ChildDied(self, STARTING)
        record = json.loads(line)
        names = ("address", "admin_address", "admin_http", "http")
        addresses = {name: record.get(name) or "" for name in names}
        workers = tuple(record.get("admin_addresses", ()))
        self.announcement = Announcement(self.pid, **addresses, admin_addresses=workers)
        return self.announcement

    async def wait(self) -> None:
        """Wait until it has ended and its last line is read."""
        await self._wait_for_end()
        if self._copying is not None:
            # Shielded: cancelling this wait must not cancel the copying.
            await asyncio.shield(self._copying)

    def end_fd(self) -> int:
        """A new file descriptor that is readable once it has ended; the caller closes it."""
        return os.pidfd_open(self.pid)

    def hold(self) -> None:
        """Hold back the lines that are to be copied from now on, the last of them if there are many."""
        self._held = deque(maxlen=_MAX_HELD_LINES)

    def release(self) -> None:
        """Copy the lines that were held back, and those to come as they come."""
        held, self._held = self._held or (), None
        for text in held:
            self._copy(text)

    def join(self, timeout_s: float) -> bool:
        """Wait for its end without an event loop; returns whether it has ended."""
        if self.is_running:
            poll, fd = select.poll(), self.end_fd()
            poll.register(fd, select.POLLIN)
            poll.poll(max(0.0, timeout_s) * 1000)
            os.close(fd)
        return not self.is_running

    async def stop(self, limit_s: float) -> bool:
        """SIGTERM, then SIGKILL after `limit_s`. Returns whether it ended by itself."""
        self.terminate()
        try:
            async with asyncio.timeout(limit_s):
                await self._wait_for_end()
        except TimeoutError:
            self.kill()
            await self.wait()
            return False
        await self.wait()
        return True

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs. A second one cuts its drain."""
        self._is_terminated = self._is_terminated or self.is_running
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        self._process.send_signal(number)

    async def _wait_for_end(self) -> None:
        if not self.is_running:
            return
        loop, fd, ended = asyncio.get_running_loop(), self.end_fd(), asyncio.Event()
        loop.add_reader(fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
            # No zombie is left, even if nothing asks for the exit code.
            self._process.poll()

    async def _copy_lines(self, stream: IO[bytes]) -> None:
        async with _reading(stream) as reader:
            while True:
                try:
                    line = await reader.readline()
                except ValueError:
                    # Longer than the limit: the reader has dropped the line.
                    continue
                if not line:
                    return
                text = line.decode(errors="replace").rstrip("\n")
                self.last_lines.append(text)
                announced = _CAUSE.fullmatch(text)
                if announced is not None:
                    # Not copied: its supervisor reports it.
                    self.announced_cause = announced[1]
                elif self.is_copied and not (self.hides_info and is_below_warning(text)):
                    self._copy(text)

    def _copy(self, text: str) -> None:
        if self._held is not None:
            self._held.append(text)
            return
        write_log_line(f"[{self.name}] {text}")


def describe_exit(code: int) -> str:
    """An exit code, a signal as a negative number, for messages."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        # Most real-time signals have no name.
        return f"was killed by signal {-code}"


@asynccontextmanager
async def _reading(stream: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    """Read a pipe line by line; it is closed afterwards."""
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), stream
    )
    try:
        yield reader
    finally:
        transport.close()
