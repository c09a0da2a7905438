"""An event loop in a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from service_kit.errors import Cancelled

_T = TypeVar("_T")

# How long an interrupted call gets to take back what it has begun.
_CANCEL_S = 5.0


class LoopThread:
    """Runs coroutines for other threads. Nothing of it is left after `close`."""

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._has_begun.wait()

    @property
    def is_running(self) -> bool:
        """Whether calls are still taken."""
        return self._loop is not None

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` and wait for it; what interrupts the waiting, e.g. Ctrl-C, cancels the work first."""
        if self._loop is None:
            work.close()
            raise Cancelled("closed")
        loop, handed = self._loop, _Handed(work)
        try:
            # Inside of the block: an interrupt may come as soon as the loop has it.
            loop.call_soon_threadsafe(handed.begin)
            return handed.answer.result()
        except concurrent.futures.CancelledError as error:
            raise Cancelled("closed while the call was running") from error
        except BaseException:
            if not handed.answer.done():
                loop.call_soon_threadsafe(handed.cancel)
                handed.is_over.wait(_CANCEL_S)
            raise

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _run(self) -> None:
        # The runner cancels the tasks that are left, and ends the loop's executor.
        with asyncio.Runner() as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_begun.set()
        await self._stopping.wait()


class _Handed(Generic[_T]):
    """Work on its way into the loop: it can be cancelled from the moment on when there is one of these."""

    def __init__(self, work: Coroutine[Any, Any, _T]) -> None:
        self.answer: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self.is_over = threading.Event()
        self._work = work
        self._task: asyncio.Task[_T] | None = None

    def begin(self) -> None:
        """Run the work. Called in the loop, as is `cancel`."""
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """End the work, whether it has begun or not."""
        if self._task is None:
            self._work.close()
            self.is_over.set()
        else:
            self._task.cancel()

    def _end(self, task: asyncio.Task[_T]) -> None:
        if task.cancelled():
            self.answer.cancel()
        elif (error := task.exception()) is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(task.result())
        self.is_over.set()
