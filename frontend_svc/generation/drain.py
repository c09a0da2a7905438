"""What a frontend still has to finish before it may stop. Knows no request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from service_kit.errors import Unavailable

_RETRY_AFTER_MS = 1000


def shutting_down() -> Unavailable:
    """What calls are told that this frontend does not take any more, or does not finish."""
    return Unavailable("this frontend is shutting down", reason="DRAINING", retry_after_ms=_RETRY_AFTER_MS)


class Drain:
    """Counts the requests that are open and those who read one, and refuses new ones once it has begun.

    `on_busy` is called when the first is there, `on_idle` when the last has ended.
    """

    def __init__(
        self, *, on_busy: Callable[[], None] = lambda: None, on_idle: Callable[[], None] = lambda: None
    ) -> None:
        self._on_busy = on_busy
        self._on_idle = on_idle
        self._num_open = 0
        self._num_awaited = 0
        self._has_begun = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        """Requests that have arrived and not ended."""
        return self._num_open

    @property
    def has_begun(self) -> bool:
        """True once new requests are refused."""
        return self._has_begun

    async def run(self) -> None:
        """Refuse new requests from here on; returns when all have ended that it waits for."""
        self._has_begun = True
        await self._idle.wait()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request as open inside of the block. Raises Unavailable when no more are taken."""
        if self._has_begun:
            raise shutting_down()
        self._num_open += 1
        try:
            with self.awaited():
                yield
        finally:
            self._num_open -= 1

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Have `run` wait for the end of the block, also where it has begun: nothing new is asked for."""
        self._num_awaited += 1
        if self._num_awaited == 1:
            self._idle.clear()
            self._on_busy()
        try:
            yield
        finally:
            self._num_awaited -= 1
            if not self._num_awaited:
                self._idle.set()
                self._on_idle()
