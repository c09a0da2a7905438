"""Writes to a gRPC stream that start immediately instead of in a task. Knows no message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

_Message = TypeVar("_Message")


class EagerWriter(Generic[_Message]):
    """Writes messages to one stream, one after the other. Belongs to the event loop.

    `write`, of a `grpc.aio` call, hands its message to the transport before its first await. So it is called
    immediately, and its coroutine is resumed when there is something to write again: a task would have to be
    scheduled for both, which takes one iteration of the event loop each.
    """

    def __init__(self, write: Callable[[_Message], Coroutine[asyncio.Future[Any], None, object]]) -> None:
        self._write = write
        self._writing: Coroutine[asyncio.Future[Any], None, object] | None = None
        self._waits_for: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._failure: Exception | None = None

    def is_free(self) -> bool:
        """Whether the stream has accepted all that was written, and accepts more."""
        while self._writing is not None and self._waits_for.done():
            failure = None if self._waits_for.cancelled() else self._waits_for.exception()
            if isinstance(failure, Exception):
                # Resumed, it would end the call with this failure, and messages not read yet would be lost.
                self._writing.close()
                self._writing, self._failure = None, failure
            else:
                self._go_on(self._writing)
        return self._writing is None and self._failure is None

    def start(self, message: _Message) -> bool:
        """Write `message`; the stream must be free. False if it fails: see `finish`."""
        assert self._writing is None, "one message at a time"
        self._go_on(self._write(message))
        return self._failure is None

    async def finish(self) -> None:
        """Wait until the stream has accepted all that was written. Raises the error of a failed write."""
        while not self.is_free() and self._failure is None:
            # Meanwhile another write may complete this one and begin.
            await asyncio.wait((self._waits_for,))
        if self._failure is not None:
            raise self._failure

    def close(self, *_: object) -> None:
        """Complete the last write in the background and ignore its result."""
        if not self.is_free() and self._writing is not None:
            self._waits_for.add_done_callback(self.close)
        else:
            # Its traceback refers to this writer: a cycle that only a full collection would free.
            self._failure = None

    def _go_on(self, writing: Coroutine[asyncio.Future[Any], None, object]) -> None:
        """Run a write up to its next await."""
        self._writing = None
        try:
            self._waits_for = writing.send(None)
            self._writing = writing
        except StopIteration:
            pass
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            self._failure = error
        except asyncio.CancelledError:
            # The call was cancelled, not the caller of this writer.
            self._failure = asyncio.InvalidStateError("the call was cancelled")
