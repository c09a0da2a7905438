from __future__ import annotations

import asyncio
import sys
import threading
from types import FrameType

import pytest

from triptych_cli.engines.loop_thread import LoopThread
from triptych_kit.errors import Cancelled


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


def test_an_interrupt_right_behind_the_handing_over_cancels_the_work_as_well() -> None:
    thread = LoopThread("test-loop")

    async def num_tasks() -> int:
        return len(asyncio.all_tasks())

    num_before = thread.call(num_tasks())

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        if (frame.f_code.co_name, event) == ("call_soon_threadsafe", "return"):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.call(asyncio.Event().wait())
    finally:
        sys.setprofile(None)
    assert thread.call(num_tasks()) == num_before
    thread.close()


def test_a_call_after_the_end_is_refused() -> None:
    thread = LoopThread("test-loop")
    thread.close()
    thread.close()
    with pytest.raises(Cancelled):
        thread.call(_add(1, 1))
