"""The open calls of a server, and how to end all of them with a service's error. Knows no service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from triptych_kit.errors import ServiceError

ErrorOf = Callable[[], ServiceError]


class OpenCall:
    """One call; created in its own task."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._task = task
        self._is_writing = False
        self._is_interrupted = False
        self._error_of: ErrorOf | None = None

    def end(self, error_of: ErrorOf) -> None:
        """End the call with an error: now, or after the message that is being written."""
        if self._error_of is not None:
            return
        self._error_of = error_of
        if not self._is_writing:
            self._is_interrupted = True
            self._task.cancel()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around a write: the status must not interrupt a message that gRPC is writing."""
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False
        if self._error_of is not None:
            raise self._error_of()

    def error_of_interruption(self) -> ServiceError | None:
        """The error that caused a CancelledError of the task; None if the client cancelled as well."""
        if not self._is_interrupted or self._error_of is None:
            return None
        return None if self._task.uncancel() else self._error_of()


class OpenCalls:
    """The calls of one server. Once they have been ended, later ones are refused with the same error."""

    def __init__(self) -> None:
        self._calls: set[OpenCall] = set()
        self._error_of: ErrorOf | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._calls)

    @contextlib.contextmanager
    def opened(self) -> Iterator[OpenCall]:
        """Count a call as open inside the block. Raises the error of `end` once that was called."""
        if self._error_of is not None:
            raise self._error_of()
        call = OpenCall()
        self._calls.add(call)
        self._idle.clear()
        try:
            yield call
        except asyncio.CancelledError as cancelled:
            error = call.error_of_interruption()
            if error is None:
                raise
            raise error from cancelled
        finally:
            self._calls.remove(call)
            if not self._calls:
                self._idle.set()

    async def end(self, error_of: ErrorOf, *, grace_s: float = 0.0) -> None:
        """End the calls that do not end by themselves within `grace_s`; returns when all have ended."""
        self._error_of = error_of
        if grace_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace_s)
        for call in list(self._calls):
            call.end(error_of)
        await self._idle.wait()
