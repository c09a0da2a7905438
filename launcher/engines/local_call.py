"""One call of a `LocalChannel`: a handler in a task, a pipe each way, how it ended. Knows no service."""

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

# As few as HTTP/2's flow control would let through: a writer must feel that its reader is slow.
_MAX_UNREAD = 16


class LocalCall:
    """A call as its client sees it: with the methods of every kind of grpc.aio call that stubs return.

    Messages are handed over as they are, so neither side may change one afterwards. `parse` makes messages of
    answers that come as bytes.
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
        """Send one more message; raises where the call has ended."""
        if not await self._requests.put(request):
            raise asyncio.InvalidStateError("the call has ended")

    async def done_writing(self) -> None:
        """Tell the handler that no more messages come."""
        self._requests.close()

    async def read(self) -> Any:
        """The next answer, or EOF after the last; AioRpcError where the call ended with another status."""
        response = await self._responses.get()
        if response is EOF:
            await self._raise_unless_ok()
        if self._parse is not None and isinstance(response, bytes):
            return self._parse(response)
        return response

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """What the handler sent before its first answer; waits for it."""
        await self._context.has_begun.wait()
        return grpc.aio.Metadata(*self._context.initial_metadata)

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        """What came with the status; waits for the end."""
        await self._ended.wait()
        return grpc.aio.Metadata(*self._context.trailing_metadata)

    async def code(self) -> grpc.StatusCode:
        """The status; waits for the end."""
        await self._ended.wait()
        return self._context.code()

    async def details(self) -> str:
        """The text of the status; waits for the end."""
        await self._ended.wait()
        return self._context.details

    def cancel(self) -> bool:
        """End the call; False where it has ended already."""
        return self._task.cancel()

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._task.done()

    def add_done_callback(self, callback: Callable[[LocalCall], object]) -> None:
        """Call `callback` when the call has ended."""
        self._task.add_done_callback(lambda _: callback(self))

    async def wait_closed(self) -> None:
        """Wait until the handler has returned."""
        await asyncio.wait({self._task})

    def __await__(self) -> Generator[Any, None, Any]:
        """The answer of a method that has one; giving up waiting cancels the call."""
        return self._only_answer().__await__()

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        """The answers of a method that has many; giving up iterating cancels the call."""
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
            # Here and not in the task, which never runs when it is cancelled at once.
            self._context.end_with(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        elif (error := task.exception()) is not None:
            self._context.end_with(grpc.StatusCode.INTERNAL, f"internal error ({type(error).__name__})")
        self._context.has_begun.set()
        self._requests.close()
        self._responses.close()
        self._ended.set()


class LocalContext:
    """A call as its handler sees it: as much of grpc's context as our interceptors and servicers use."""

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
        """The headers of the call."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, never below 0; None: there is none."""
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Answer the headers."""
        self.initial_metadata = tuple(metadata)
        self.has_begun.set()

    async def write(self, response: Any) -> None:
        """Send an answer; waits while the client has many unread."""
        await self._responses.put(response)

    async def abort_with_status(self, status: grpc.Status) -> None:
        """End the call with `status`, by raising."""
        self.trailing_metadata = tuple(status.trailing_metadata or ())
        self.end_with(status.code, status.details)
        raise grpc.aio.AbortError(status.details)

    def end_with(self, code: grpc.StatusCode, details: str) -> None:
        """Note the status of the call."""
        self._code, self.details = code, details

    def code(self) -> grpc.StatusCode:
        """The status noted so far."""
        return self._code


class _Pipe:
    """Messages from one writer to one reader, a bounded number unread; closed by the writer or at the end."""

    def __init__(self) -> None:
        self._unread: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False

    async def put(self, message: Any) -> bool:
        """Hand over `message`, waiting for room; False where nobody will read it."""
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
        """Nothing more comes; what is unread stays readable."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        # Whoever waits looks again; a set event that nobody waits for would make a later wait a busy one.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def function_of(handler: Any) -> Callable[[Any, Any], Awaitable[Any]]:
    """The function of a method handler, whatever its kind."""
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
