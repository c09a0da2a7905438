"""Processes that answer one line of JSON with one line of JSON. Imports nothing that a peer might lack."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

Line = dict[str, Any]

_REPOSITORY = Path(__file__).resolve().parent.parent.parent
_END_S = 30.0
_NICENESS = 19
_READ_BYTES = 64 * 1024


class LineProcessFailed(Exception):
    """A process ended, or reached its limit, before it had answered."""


class LineProcess:
    """A process of a measurement. Its first line is there before the constructor returns: `facts`.

    answer_s: limit of the time until its first line, and of each answer; then it is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cores: set[int] | None = None,
        end_s: float = _END_S,
        answer_s: float | None = None,
        folder: Path = _REPOSITORY,
    ) -> None:
        self._name, self._end_s, self._answer_s = " ".join(command), end_s, answer_s
        self._unread = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            # Threads that libraries start at their import inherit the cores.
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )
        self.pid = self._process.pid
        try:
            self.facts = self._read()
        except LineProcessFailed:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its input; kill it where it does not end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(self._end_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, **command: Any) -> Line:
        """The answer to one command. Raises LineProcessFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise LineProcessFailed(f"{self._name} has ended") from error
        return self._read()

    def _read(self) -> Line:
        """The next line that is an answer: peers print other things too."""
        assert self._process.stdout is not None
        limit_s = self._answer_s
        ends_at = None if limit_s is None else time.monotonic() + limit_s
        while True:
            line, has_ended, rest = self._unread.partition(b"\n")
            if has_ended:
                self._unread = rest
                if line.startswith(b"{"):
                    answer: Line = json.loads(line)
                    return answer
                continue
            left_s = None if ends_at is None else max(0.0, ends_at - time.monotonic())
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                self._process.kill()
                raise LineProcessFailed(f"{self._name} gave no answer within {limit_s:g} s")
            data = os.read(self._process.stdout.fileno(), _READ_BYTES)
            if not data:
                raise LineProcessFailed(f"{self._name} ended with {self._process.wait()} and gave no answer")
            self._unread += data


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of this checkout."""
    return [sys.executable, "-m", name, *arguments]


def give_way() -> None:
    """Leave the cores to a stack on this host. Linux divides them among sessions first."""
    os.setsid()
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS), encoding="ascii")


def send_line(line: Line) -> None:
    print(json.dumps(line), flush=True)


async def answer_lines(answer: Callable[[Line], Awaitable[Line]]) -> None:
    """Answer each line of this process's standard input until it ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        send_line(await answer(json.loads(line)))
