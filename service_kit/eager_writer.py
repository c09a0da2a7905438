"""Writes to a gRPC stream that begin where their message is made, and not in a task. Knows no message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

_Message = TypeVar("_Message")


class EagerWriter(Generic[_Message]):
    """Writes messages to one stream, one after the other. Belongs to the event loop.

    `write`, that of a `grpc.aio` call, gives its message to the wire before it waits for the first time. So
    it is called at once, and what is left of it is done when there is something to write again: a task would
    have to be woken for the one and for the other, which takes a turn of the loop each.
    """

    def __init__(self, write: Callable[[_Message], Coroutine[asyncio.Future[Any], None, object]]) -> None:
        self._write = write
        self._writing: Coroutine[asyncio.Future[Any], None, object] | None = None
        self._waits_for: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._failure: Exception | None = None

    def is_free(self) -> bool:
        """Whether the stream has taken all that was written, and takes more."""
        while self._writing is not None and self._waits_for.done():
            failure = None if self._waits_for.cancelled() else self._waits_for.exception()
            if isinstance(failure, Exception):
                # Let go on, it would end the call by this failure, with all that is still to be read on it.
                self._writing.close()
                self._writing, self._failure = None, failure
            else:
                self._go_on(self._writing)
        return self._writing is None and self._failure is None

    def start(self, message: _Message) -> bool:
        """Give `message` to the wire, which has to be free. False where it fails: see `finish`."""
        assert self._writing is None, "one message at a time"
        self._go_on(self._write(message))
        return self._failure is None

    async def finish(self) -> None:
        """Wait until the stream has taken all that was written. Raises what a write has ended with."""
        while not self.is_free() and self._failure is None:
            # Meanwhile another write may end this one and begin.
            await asyncio.wait((self._waits_for,))
        if self._failure is not None:
            raise self._failure

    def close(self, *_: object) -> None:
        """Nobody waits any more for what was written, or looks at what it ends with."""
        if not self.is_free() and self._writing is not None:
            self._waits_for.add_done_callback(self.close)
        else:
            # Its traceback has this writer: a cycle that only a full collection would free.
            self._failure = None

    def _go_on(self, writing: Coroutine[asyncio.Future[Any], None, object]) -> None:
        """Let a write go on to where it waits next."""
        self._writing = None
        try:
            self._waits_for = writing.send(None)
            self._writing = writing
        except StopIteration:
            pass
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            self._failure = error
        except asyncio.CancelledError:
            # The call was, and not whoever has something to write.
            self._failure = asyncio.InvalidStateError("the call was cancelled")
