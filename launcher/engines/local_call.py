"""One call of a `LocalChannel`: a handler task, a pipe in each direction, and a status. Knows no service."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs leave it out

Pairs = tuple[tuple[str, str | bytes], ...]
FindHandler = Callable[[str, Pairs], Awaitable[Any]]

# As few as HTTP/2 flow control would allow, so that a slow reader blocks its writer.
_MAX_UNREAD = 16


class LocalCall:
    """Client side of a call, with the methods of every kind of grpc.aio call that stubs return.

    Messages are passed by reference, so neither side may modify them afterwards. `parse` converts answers
    that are bytes to messages.
    """

    def __init__(
        self,
        find_handler: FindHandler,
        method: str,
        *,
        request: Any = None,
        metadata: Pairs = (),
        timeout_s: float | None = None,
        parse: Callable[[bytes], Any] | None = None,
    ) -> None:
        self._parse = parse
        self._requests = _Pipe()
        self._responses = _Pipe()
        self._context = LocalContext(self._responses, metadata, timeout_s)
        self._ended = asyncio.Event()
        self._task = asyncio.ensure_future(self._serve(find_handler, method, request, timeout_s))
        self._task.add_done_callback(self._end)

    async def write(self, request: Any) -> None:
        """Send one more message; raises if the call has ended."""
        if not await self._requests.put(request):
            raise asyncio.InvalidStateError("the call has ended")

    async def done_writing(self) -> None:
        """End the stream of messages to the handler."""
        self._requests.close()

    async def read(self) -> Any:
        """The next answer, or EOF after the last; AioRpcError if the status is not OK."""
        response = await self._responses.get()
        if response is EOF:
            await self._raise_unless_ok()
        if self._parse is not None and isinstance(response, bytes):
            return self._parse(response)
        return response

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """Waits for the handler's first answer."""
        await self._context.has_begun.wait()
        return grpc.aio.Metadata(*self._context.initial_metadata)

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        """Waits for the end of the call."""
        await self._ended.wait()
        return grpc.aio.Metadata(*self._context.trailing_metadata)

    async def code(self) -> grpc.StatusCode:
        """Waits for the end of the call."""
        await self._ended.wait()
        return self._context.code()

    async def details(self) -> str:
        """Waits for the end of the call."""
        await self._ended.wait()
        return self._context.details

    def cancel(self) -> bool:
        """Cancel the call; False if it has ended already."""
        return self._task.cancel()

    def done(self) -> bool:
        return self._task.done()

    def add_done_callback(self, callback: Callable[[LocalCall], object]) -> None:
        self._task.add_done_callback(lambda _: callback(self))

    async def wait_closed(self) -> None:
        """Wait until the handler has returned."""
        await asyncio.wait({self._task})

    def __await__(self) -> Generator[Any, None, Any]:
        """The answer of a unary response; cancelling the wait cancels the call."""
        return self._only_answer().__await__()

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        """The answers of a streaming response; abandoning the iteration cancels the call."""
        try:
            while (response := await self.read()) is not EOF:
                yield response
        finally:
            self.cancel()

    async def _only_answer(self) -> Any:
        try:
            response = await self._responses.get()
            await self._ended.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        await self._raise_unless_ok()
        return response

    async def _raise_unless_ok(self) -> None:
        await self._ended.wait()
        context = self._context
        if context.code() is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                context.code(),
                grpc.aio.Metadata(*context.initial_metadata),
                grpc.aio.Metadata(*context.trailing_metadata),
                context.details,
                None,
            )

    async def _serve(
        self, find_handler: FindHandler, method: str, request: Any, timeout_s: float | None
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                handler = await find_handler(method, self._context.invocation_metadata())
                argument = aiter(self._requests) if handler.request_streaming else request
                answer = await function_of(handler)(argument, self._context)
                if not handler.response_streaming:
                    await self._responses.put(answer)
        except grpc.aio.AbortError:
            pass  # The context holds the status that the handler gave.
        except TimeoutError:
            self._context.end_with(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            # Not in the task, which never runs if it is cancelled at once.
            self._context.end_with(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        elif (error := task.exception()) is not None:
            self._context.end_with(grpc.StatusCode.INTERNAL, f"internal error ({type(error).__name__})")
        self._context.has_begun.set()
        self._requests.close()
        self._responses.close()
        self._ended.set()


class LocalContext:
    """Server side of a call: the part of grpc's context that our interceptors and servicers use."""

    def __init__(self, responses: _Pipe, metadata: Pairs, timeout_s: float | None) -> None:
        self._responses = responses
        self._metadata = metadata
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._code = grpc.StatusCode.OK
        self.details = ""
        self.initial_metadata: Pairs = ()
        self.trailing_metadata: Pairs = ()
        self.has_begun = asyncio.Event()

    def invocation_metadata(self) -> Pairs:
        return self._metadata

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, at least 0; None without a deadline."""
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        self.initial_metadata = tuple(metadata)
        self.has_begun.set()

    async def write(self, response: Any) -> None:
        """Send an answer; waits while the client has too many unread."""
        await self._responses.put(response)

    async def abort_with_status(self, status: grpc.Status) -> None:
        """End the call with `status`, by raising."""
        self.trailing_metadata = tuple(status.trailing_metadata or ())
        self.end_with(status.code, status.details)
        raise grpc.aio.AbortError(status.details)

    def end_with(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self.details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code


class _Pipe:
    """Bounded queue from one writer to one reader; closed by the writer or at the end of the call."""

    def __init__(self) -> None:
        self._unread: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False

    async def put(self, message: Any) -> bool:
        """Put `message`, waiting for space; False if it will not be read."""
        while len(self._unread) >= _MAX_UNREAD and not self._is_closed:
            await self._changed.wait()
        if self._is_closed:
            return False
        self._unread.append(message)
        self._wake()
        return True

    async def get(self) -> Any:
        """The next message, or EOF."""
        while not self._unread:
            if self._is_closed:
                return EOF
            await self._changed.wait()
        message = self._unread.popleft()
        self._wake()
        return message

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        while (message := await self.get()) is not EOF:
            yield message

    def close(self) -> None:
        """No more messages follow; unread ones can still be read."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        # Waiters check again. An event that stays set would turn a later wait into a busy loop.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def function_of(handler: Any) -> Callable[[Any, Any], Awaitable[Any]]:
    """The function of a method handler of any kind."""
    functions = {
        (False, False): handler.unary_unary,
        (False, True): handler.unary_stream,
        (True, False): handler.stream_unary,
        (True, True): handler.stream_stream,
    }
    function: Callable[[Any, Any], Awaitable[Any]] = functions[
        handler.request_streaming, handler.response_streaming
    ]
    return function
