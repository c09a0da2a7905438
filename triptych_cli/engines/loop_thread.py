"""An event loop in a background thread, for blocking callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from triptych_kit.errors import Cancelled

_T = TypeVar("_T")

# Time for an interrupted call to clean up.
_CANCEL_S = 5.0


class LoopThread:
    """Runs coroutines for other threads. `close` ends its tasks and its thread."""

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._has_begun.wait()

    @property
    def is_running(self) -> bool:
        """Whether calls are still accepted."""
        return self._loop is not None

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` and wait for it; an interrupt of the wait, e.g. Ctrl-C, cancels the work first."""
        if self._loop is None:
            work.close()
            raise Cancelled("closed")
        loop, handed = self._loop, _Handed(work)
        try:
            # Inside the block: an interrupt may come as soon as the work is submitted.
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
        """Cancel running work and end the thread."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _run(self) -> None:
        # The runner cancels remaining tasks, and shuts down the loop's executor.
        with asyncio.Runner() as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_begun.set()
        await self._stopping.wait()


class _Handed(Generic[_T]):
    """Work submitted to the loop; it can be cancelled even before it has begun."""

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
        """Cancel the work, whether or not it has begun."""
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
