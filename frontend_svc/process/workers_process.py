"""One worker process, from its parent's side: start, announcement, exit code, stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service_kit.process import signal_child


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Process id and admin address of a worker."""

    pid: int
    admin_address: str


class WorkerDied(Exception):
    """A worker ended, or did not serve in time. `exit_code` is never 0."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code or 1


class WorkerProcess:
    """A running worker. It writes to the stderr of its parent."""

    def __init__(self, index: int, process: asyncio.subprocess.Process, pipe_fd: int) -> None:
        self.index = index
        self._process = process
        self._pipe_fd = pipe_fd
        self._is_asked_to_end = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def exit_code(self) -> int:
        """Its exit code as a shell reports it; 0 while it runs and after a requested SIGTERM."""
        code = self._process.returncode or 0
        if code == -signal.SIGTERM and self._is_asked_to_end:
            return 0
        return 128 - code if code < 0 else code

    async def wait(self) -> None:
        await self._process.wait()

    async def announced(self, limit_s: float) -> WorkerAddress:
        """Wait for the worker's announcement. Raises WorkerDied; kills a worker that exceeds the limit."""
        line = b""
        try:
            async with asyncio.timeout(limit_s):
                line = await self._read_line()
        except TimeoutError as error:
            signal_child(self._process, signal.SIGKILL)
            await self.wait()
            raise WorkerDied(f"worker {self.index} did not serve within {limit_s:g} s", 1) from error
        if not line:
            await self.wait()
            raise WorkerDied(
                f"worker {self.index} (pid {self.pid}) ended with {self.exit_code}", self.exit_code
            )
        record = json.loads(line)
        return WorkerAddress(self.pid, str(record["admin_address"]))

    def terminate(self) -> None:
        """Send SIGTERM if it runs. The first starts its drain, the second cuts it short."""
        if self._process.returncode is None:
            self._is_asked_to_end = True
            signal_child(self._process, signal.SIGTERM)

    async def stop(self, limit_s: float) -> None:
        """Terminate it and wait; kill it after `limit_s`."""
        self.terminate()
        try:
            async with asyncio.timeout(limit_s):
                await self.wait()
        except TimeoutError:
            signal_child(self._process, signal.SIGKILL)
            await self.wait()

    async def _read_line(self) -> bytes:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._pipe_fd, "rb")
        )
        try:
            return await reader.readline()
        finally:
            transport.close()


async def start_worker(index: int, command: Sequence[str], environment: Mapping[str, str]) -> WorkerProcess:
    """Start a worker, which leaves this process group by itself (`workers_main`).

    The command line has the pipe for its announcement. Never forks without exec: gRPC's threads do not
    survive a fork.
    """
    read_fd, write_fd = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            f"--announce-fd={write_fd}",
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(write_fd,),
            env=dict(environment),
        )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return WorkerProcess(index, process, read_fd)
