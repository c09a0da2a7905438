"""A stream of events that is read by `async for` and cancelled by closing. Knows no channel."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Generic, Self

import grpc
from google.protobuf.message import Message

from triptych_client.aio_waiting import Closing, StreamCall
from triptych_client.chat_events import ChatDelta
from triptych_client.errors import TriptychError, from_rpc_error
from triptych_client.events import Delta
from triptych_client.stream_plan import EventT, NextCall, StreamPlan


class Stream(Generic[EventT]):
    """The events of one request, over all the calls that its plan makes.

    Leaving the `async with` block early, or `aclose`, cancels the request at the server.
    """

    def __init__(
        self,
        start: Callable[[NextCall], StreamCall],
        plan: StreamPlan[EventT],
        abort: Callable[[str], Awaitable[None]],
    ) -> None:
        """Make the first call. `abort` ends a request that outlives its call, by its id."""
        self._start = start
        self._plan = plan
        self._abort = abort
        self._closing = Closing()
        self._call = start(plan.first_call())

    def __aiter__(self) -> AsyncIterator[EventT]:
        """Iterate over the remaining events."""
        return self

    async def __anext__(self) -> EventT:
        """The next event. Raises TriptychError if the stream ends with a status other than OK."""
        while message := await self._read():
            event = self._plan.take(message)
            if event is not None:
                return event
        raise StopAsyncIteration

    async def text_deltas(self, output_index: int = 0) -> AsyncIterator[str]:
        """Only the text of one output; for a conversation, the content of the answer."""
        async for event in self:
            if isinstance(event, Delta | ChatDelta) and event.output_index == output_index and event.text:
                yield event.text

    async def aclose(self) -> None:
        """Cancel the rest of the request. Without effect once the stream has ended."""
        self._closing.set()
        self._call.cancel()
        if request_id := self._plan.take_abandoned():
            await self._abort(request_id)

    async def _read(self) -> Message | None:
        while not self._closing.is_set():
            try:
                message = await self._closing.read(self._call)
            except grpc.RpcError as error:
                if not self._closing.is_set():
                    await self._go_on(from_rpc_error(error))
                continue
            if message is not None:
                return message
            if not self._closing.is_set():
                self._plan.end()
                self._closing.set()
        return None

    async def _go_on(self, error: TriptychError) -> None:
        try:
            next_call = self._plan.after_error(error)
        except TriptychError:
            self._closing.set()
            raise
        if await self._closing.is_set_within(next_call.after_s):
            return
        self._call = self._start(next_call)
        # Another thread may have closed the stream meanwhile, and cancelled only the call before.
        if self._closing.is_set():
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
