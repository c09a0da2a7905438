"""Drain: refuses new requests and waits for the open ones. Knows no request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from triptych_kit.errors import Unavailable

_RETRY_AFTER_MS = 1000


def shutting_down() -> Unavailable:
    """The status of calls that a draining frontend refuses or does not finish."""
    return Unavailable("this frontend is shutting down", reason="DRAINING", retry_after_ms=_RETRY_AFTER_MS)


class Drain:
    """Counts open requests and calls that read one, and refuses new requests once the drain has begun.

    `on_busy` is called when the count leaves 0, `on_idle` when it returns to 0.
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
        return self._num_open

    @property
    def has_begun(self) -> bool:
        return self._has_begun

    async def run(self) -> None:
        """Refuse new requests from now on; returns when all counted and awaited blocks have ended."""
        self._has_begun = True
        await self._idle.wait()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request as open inside of the block. Raises Unavailable once the drain has begun."""
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
        """Make `run` wait for the end of the block. Allowed during a drain: it starts no new request."""
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
