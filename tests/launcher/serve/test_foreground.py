"""Verbs that work until a signal: how they end, and the file that says that they are ready."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from launcher.serve.foreground import remove_ready_file, run_until_signal, write_ready_file


class Verb:
    """Remembers what was done to it."""

    def __init__(self, failure: Exception | None = None, *, signals_at_stop: int = 0) -> None:
        self.events: list[str] = []
        self._failure = failure
        self._signals_at_stop = signals_at_stop
        self._hurried = asyncio.Event()

    async def run(self, *, until_signal: bool) -> int:
        return await run_until_signal(
            self._work(until_signal),
            stop=self._stop,
            hurry=self._hurry,
            failures=(OSError,),
            report=self.events.append,
        )

    async def _work(self, until_signal: bool) -> None:
        if self._failure is not None:
            raise self._failure
        if until_signal:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    async def _stop(self) -> None:
        self.events.append("stop")
        if self._signals_at_stop:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(self._hurried.wait(), 10)

    async def _hurry(self) -> None:
        self.events.append("hurry")
        self._hurried.set()


async def test_a_signal_stops_the_work_and_a_second_one_hurries() -> None:
    verb = Verb(signals_at_stop=1)
    assert await verb.run(until_signal=True) == 0
    assert verb.events == ["stop", "hurry"]


async def test_work_that_is_done_ends_the_verb() -> None:
    verb = Verb()
    assert await verb.run(until_signal=False) == 0
    assert verb.events == ["stop"]


async def test_a_failure_that_people_can_mend_is_reported_and_a_bug_is_raised() -> None:
    verb = Verb(OSError("no such host"))
    assert await verb.run(until_signal=False) == 1
    assert verb.events == ["no such host", "stop"]
    verb = Verb(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        await verb.run(until_signal=False)
    assert verb.events == ["stop"]


def test_the_ready_file_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    write_ready_file(str(path), {"grpc": "h:1"})
    assert json.loads(path.read_text()) == {"grpc": "h:1"}
    remove_ready_file(str(path))
    assert list(tmp_path.iterdir()) == []
    remove_ready_file(str(path))
    write_ready_file(None, {})
    remove_ready_file(None)
