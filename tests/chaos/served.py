"""A `triptych serve` that is scaled by its command line, and what its processes log. Knows no request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.rig.processes import log_instant
from tests.processes import running_async

_REPOSITORY = Path(__file__).resolve().parent.parent.parent
_ROOTS = (str(_REPOSITORY), str(_REPOSITORY / "protos"), str(_REPOSITORY / "kernels"))
_START_LIMIT_S = 180.0
_STOP_LIMIT_S = 60.0
_LEAVE_LIMIT_S = 60.0
_POLL_S = 0.05
_LINE = re.compile(r"\[(?P<name>[a-z]+-\d+)\] (?P<text>\{.*)")
_READY = re.compile(r"\[serve\] (?P<name>engine-\d+) READY at \S+ \(pid (?P<pid>\d+)\)")
_LEFT = re.compile(r"\[serve\] (?P<name>engine-\d+) \(pid \d+\) (?P<ending>.*) and is not started again")


class ServeFailed(Exception):
    """The stack has ended, or has not done what it had to in time."""


@dataclass(frozen=True, slots=True)
class ScaleOutcome:
    """What `triptych admin ADDRESS scale` came to."""

    exit_code: int
    lines: tuple[str, ...]
    took_s: float


class ServedStack:
    """One `triptych serve`, from its start to the end of the block. Its output goes to a file.

    environment: of its processes, beside ours; they import from its PYTHONPATH as well.
    """

    def __init__(
        self, folder: Path, flags: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.log_file = folder / "serve.log"
        self._environment = _environment(environment or {})
        self._ready_file = folder / "ready.json"
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None
        self._ending = contextlib.AsyncExitStack()

    async def __aenter__(self) -> ServedStack:
        with self.log_file.open("ab") as log:
            process = running_async(
                *(
                    sys.executable,
                    "-m",
                    "triptych_cli.cli",
                    "serve",
                    "--port=0",
                    "--grpc-port=0",
                    "--log-format=json",
                ),
                f"--ready-file={self._ready_file}",
                *self._flags,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=_REPOSITORY,
            )
            self._process = await self._ending.enter_async_context(process)
        try:
            await self._until(self._ready_file.exists, _START_LIMIT_S, "ready")
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def address(self) -> str:
        return str(self._ready()["grpc"])

    @property
    def http(self) -> str:
        return str(self._ready()["http"])

    @property
    def num_engines(self) -> int:
        """How many engines its launcher runs that were ready."""
        return sum(process["service"] == "engine" for process in self.processes())

    def processes(self) -> list[dict[str, Any]]:
        """Each of its services: its index, pid and addresses."""
        return list(self._ready()["processes"])

    def process(self, service: str) -> dict[str, Any]:
        """The first process of a service."""
        return next(process for process in self.processes() if process["service"] == service)

    def pids(self) -> dict[str, int]:
        """The process ids of its services, by names such as engine-0."""
        return {f"{process['service']}-{process['index']}": process["pid"] for process in self.processes()}

    def given_up(self) -> list[str]:
        """The names of the services that stay down."""
        return list(self._ready()["given_up"])

    async def scale(self, size: int, *, timeout_s: float = 120.0) -> ScaleOutcome:
        """Change the number of engines and wait for the command's end."""
        admin = self.process("coordinator")["admin_address"]
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        async with running_async(
            *(sys.executable, "-m", "triptych_cli.cli", "admin", admin, "scale", str(size)),
            f"--timeout={timeout_s:g}",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            cwd=_REPOSITORY,
        ) as process:
            out, _ = await asyncio.wait_for(process.communicate(), timeout_s + _STOP_LIMIT_S)
        lines = tuple(out.decode().splitlines())
        return ScaleOutcome(process.returncode or 0, lines, loop.time() - began_at)

    async def until_left(self, num_engines: int) -> list[str]:
        """Wait until so many engines have left for good; how each of them ended, with its name."""
        await self._until(lambda: len(self._left()) >= num_engines, _LEAVE_LIMIT_S, "without its leavers")
        return self._left()

    def ready_instants(self) -> dict[str, float]:
        """When each engine logged that it was READY, by its id, in s since 1970; in order of that."""
        logged: dict[str, float] = {}
        instants: dict[str, float] = {}
        for line in self.log_file.read_text(errors="replace").splitlines():
            if found := _READY.match(line):
                # As an engine calls itself whose port the kernel has chosen.
                engine_id = f"{socket.gethostname()}:pid-{found['pid']}"
                instants[engine_id] = logged.pop(found["name"])
            elif (found := _LINE.match(line)) and '"READY"' in line:
                record = json.loads(found["text"])
                if record.get("msg") == "READY":
                    logged[found["name"]] = log_instant(record)
        return instants

    def log_records(self, message: str) -> list[dict]:
        """The records of that message which its processes have logged, in order."""
        lines = self.log_file.read_text(errors="replace").splitlines()
        records = [json.loads(found["text"]) for line in lines if (found := _LINE.match(line))]
        return [record for record in records if record.get("msg") == message]

    def _left(self) -> list[str]:
        text = self.log_file.read_text(errors="replace")
        return [f"{found['name']} {found['ending']}" for found in _LEFT.finditer(text)]

    def _ready(self) -> dict:
        ready: dict = json.loads(self._ready_file.read_text())
        return ready

    async def _until(self, holds: Callable[[], bool], limit_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                # Another process has no event to wait for.
                while not holds():
                    if self._process is None or self._process.returncode is not None:
                        raise ServeFailed(f"serve ended before it was {what}: {self._tail()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise ServeFailed(f"serve is not {what} after {limit_s:g} s: {self._tail()}") from error

    def _tail(self) -> str:
        return self.log_file.read_text(errors="replace")[-3000:]

    async def _stop(self) -> None:
        async with self._ending:
            if self._process is not None and self._process.returncode is None:
                self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), _STOP_LIMIT_S)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    path = filter(None, (*_ROOTS, more.get("PYTHONPATH")))
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # Only the test sends requests, and it knows when it stops the stack.
        "TRIPTYCH_FRONTEND_DRAIN_LAG_S": "0",
        "TRIPTYCH_FRONTEND_TEXT_WORKERS": "1",
        **more,
        "PYTHONPATH": os.pathsep.join(path),
    }
