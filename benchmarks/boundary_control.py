"""Lines of JSON between the benchmark and the processes that it measures. Knows none of them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

Line = dict[str, Any]

_REPOSITORY = Path(__file__).resolve().parent.parent
_END_S = 2.0


class ContestantFailed(Exception):
    """A process ended before it had answered."""


class ContestantProcess:
    """One process of a measurement, on the cores it may use, that answers one line with one line."""

    def __init__(self, module: str, arguments: Sequence[str], cores: set[int]) -> None:
        self._name = f"{module} {' '.join(arguments)}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_REPOSITORY,
            # Threads that libraries start at their import inherit the cores.
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self.facts = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None, "the process was started with a pipe"
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, **command: Any) -> Line:
        """The answer to one command. Raises ContestantFailed."""
        assert self._process.stdin is not None, "the process was started with a pipe"
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ContestantFailed(f"{self._name} has ended") from error
        return self._read()

    def _read(self) -> Line:
        assert self._process.stdout is not None, "the process was started with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise ContestantFailed(f"{self._name} ended with {self._process.wait()} and gave no answer")
        answer: Line = json.loads(line)
        return answer


def say(line: Line) -> None:
    """Answer the benchmark."""
    print(json.dumps(line), flush=True)


async def answer_lines(answer: Callable[[Line], Awaitable[Line]]) -> None:
    """Answer each line of the standard input until it ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        say(await answer(json.loads(line)))
