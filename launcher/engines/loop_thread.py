"""An event loop in a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

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
        is_over = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_followed(work, is_over), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise Cancelled("closed while the call was running") from error
        except BaseException:
            if future.cancel():
                is_over.wait(_CANCEL_S)
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


async def _followed(work: Coroutine[Any, Any, _T], is_over: threading.Event) -> _T:
    try:
        return await work
    finally:
        is_over.set()
