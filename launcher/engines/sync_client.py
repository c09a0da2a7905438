"""Blocking client of engines in other processes: a background thread reads, calls wait for its results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from launcher.engines.async_client import AsyncEngineClient
from launcher.engines.core_client import CoreOutput
from launcher.engines.loop_thread import LoopThread
from triptych.engine.v1 import add_pb2, engine_pb2

_P = ParamSpec("_P")
_T = TypeVar("_T")


class SyncEngineClient:
    """An `AsyncEngineClient` in a background thread. Its errors are raised in the caller."""

    def __init__(self, addresses: Sequence[str], *, start_timeout_s: float = 600.0) -> None:
        """Connect, and wait until every engine is ready."""
        self._thread = LoopThread("engine-client")
        try:
            self._client = self._thread.call(_started(addresses, start_timeout_s))
        except BaseException:
            self._thread.close()
            raise

    def add(self, entry: add_pb2.AddEntry) -> int:
        """Send a request; returns its handle."""
        return self._thread.call(_now(self._client.add, entry))

    def abort(self, handles: Iterable[int], reason: engine_pb2.AbortReason) -> None:
        """Abort requests: one message to each engine that has some of them."""
        self._thread.call(_now(self._client.abort, handles, reason))

    def get_output(self, timeout_s: float | None = None) -> CoreOutput:
        """The next outputs. TimeoutError if there are none in time."""
        return self._thread.call(asyncio.wait_for(self._client.get_output(), timeout_s))

    def close(self) -> None:
        """Close every session, and end the thread."""
        if self._thread.is_running:
            self._thread.call(self._client.close())
            self._thread.close()


async def _started(addresses: Sequence[str], timeout_s: float) -> AsyncEngineClient:
    client = AsyncEngineClient(addresses)
    try:
        await client.start(timeout_s=timeout_s)
    except BaseException:
        await client.close()
        raise
    return client


async def _now(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call `function` in the loop's thread, which owns the client's state."""
    return function(*args, **kwargs)
