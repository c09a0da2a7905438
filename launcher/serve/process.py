"""One supervised child process: started, announced, followed, stopped. Knows no gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service_kit.process import signal_child, signal_name

_NUM_LAST_LINES = 20
# Limit of one line of a child's log.
_MAX_LINE_BYTES = 64 * 1024

# The time of death in messages of `ChildDied`.
STARTING = "while it was starting"


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """A process to run: service, index, and command without the flags that the supervisor adds."""

    service: str
    index: int
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name in messages and logs."""
        return f"{self.service}-{self.index}"


@dataclass(frozen=True, slots=True)
class Announcement:
    """The addresses that a child has announced."""

    pid: int
    address: str
    admin_address: str


class ChildDied(Exception):
    """A child ended unexpectedly. The message has its name, its end, its last log lines, and `when`."""

    def __init__(self, child: ChildProcess, when: str = "") -> None:
        words = [child.plan.name, child.ending, *([when] if when else [])]
        last_lines = [line for line in child.last_lines if line.strip()]
        reason = f": {last_lines.pop()}" if last_lines else ""
        before = "".join(f"\n    {line}" for line in last_lines)
        super().__init__(" ".join(words) + reason + (before and "\n  its lines before that:" + before))


class ChildProcess:
    """A running child. Its output is copied to our stderr, unless quiet; the last lines are kept."""

    def __init__(self, plan: ProcessPlan, process: asyncio.subprocess.Process, *, quiet: bool) -> None:
        self.plan = plan
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self.announcement: Announcement | None = None
        self._process = process
        self._quiet = quiet
        self._copying = asyncio.ensure_future(self._copy_lines())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    @property
    def exit_code(self) -> int | None:
        """The exit code, a signal as a negative number; None while it runs."""
        return self._process.returncode

    @property
    def ending(self) -> str:
        """How it ended, for messages."""
        code = self._process.returncode
        if code is None:
            return f"(pid {self.pid}) is running"
        if code < 0:
            return f"(pid {self.pid}) was killed by {signal_name(-code)}"
        return f"(pid {self.pid}) exited with code {code}"

    async def wait(self) -> None:
        """Wait until it has ended and its last line is read."""
        await self._process.wait()
        # Shielded: cancelling this wait must not cancel the copying.
        await asyncio.shield(self._copying)

    async def announced(self, pipe_fd: int) -> Announcement:
        """Wait for the announcement on its pipe; raises ChildDied if it ends without one."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe_fd, "rb")
        )
        try:
            line = await reader.readline()
        finally:
            transport.close()
        if not line:
            await self.wait()
            raise ChildDied(self, STARTING)
        record = json.loads(line)
        self.announcement = Announcement(record["pid"], record["address"], record.get("admin_address") or "")
        return self.announcement

    async def stop(self, limit_s: float) -> bool:
        """SIGTERM, then SIGKILL after `limit_s`. Returns whether it ended by itself."""
        self.terminate()
        try:
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            await self.wait()
            return False
        await self.wait()
        return True

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs. A second one cuts its drain."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        signal_child(self._process, number)

    async def _copy_lines(self) -> None:
        stream = self._process.stdout
        while stream is not None:
            try:
                line = await stream.readline()
            except ValueError:
                # Longer than the limit: the reader has dropped the line.
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip("\n")
            self.last_lines.append(text)
            if not self._quiet:
                self._copy(text)

    def _copy(self, text: str) -> None:
        try:
            print(f"[{self.plan.name}] {text}", file=sys.stderr, flush=True)
        except OSError:
            # Our stderr is closed. The child's output must still be read, else it would block on a full pipe.
            self._quiet = True


async def spawn(
    plan: ProcessPlan, flags: Sequence[str], environment: Mapping[str, str], *, quiet: bool = False
) -> tuple[ChildProcess, int]:
    """Start a child, which leaves our process group by itself (`launcher.serve.child`).

    Returns it with the read end of its announcement pipe. Never forks Python: a copy of the
    state of gRPC's threads would not work.
    """
    read_fd, write_fd = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *plan.command,
            *flags,
            f"--index={plan.index}",
            f"--announce-fd={write_fd}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_MAX_LINE_BYTES,
            pass_fds=(write_fd,),
            env=dict(environment),
        )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return ChildProcess(plan, process, quiet=quiet), read_fd
