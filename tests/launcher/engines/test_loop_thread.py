from __future__ import annotations

import asyncio
import threading

import pytest

from launcher.engines.loop_thread import LoopThread
from service_kit.errors import Cancelled


async def _add(first: int, second: int) -> int:
    await asyncio.sleep(0)
    return first + second


async def _fail() -> None:
    raise ZeroDivisionError("there")


def test_a_call_returns_what_the_work_returns_or_raises_what_it_raises() -> None:
    thread = LoopThread("test-loop")
    assert thread.call(_add(2, 3)) == 5
    with pytest.raises(ZeroDivisionError, match="there"):
        thread.call(_fail())
    thread.close()


def test_closing_ends_calls_that_run_and_the_thread() -> None:
    thread = LoopThread("test-loop")
    has_begun, was_cancelled, raised = threading.Event(), threading.Event(), []

    async def hang() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    def call() -> None:
        try:
            thread.call(hang())
        except Cancelled as error:
            raised.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert has_begun.wait(10)
    thread.close()
    caller.join(10)
    assert was_cancelled.is_set()
    assert len(raised) == 1
    assert "test-loop" not in {left.name for left in threading.enumerate()}


def test_a_call_after_the_end_is_refused() -> None:
    thread = LoopThread("test-loop")
    thread.close()
    thread.close()
    with pytest.raises(Cancelled):
        thread.call(_add(1, 1))
