"""A stream of events that is read by `async for` and cancelled by closing. Knows no channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self

import grpc

from triptych.api.v1 import generate_pb2
from triptych_client.errors import from_rpc_error
from triptych_client.events import Delta, Event, to_event


class StreamCall(Protocol):
    """What gRPC's awaited calls with many answers can do."""

    async def read(self) -> generate_pb2.GenerateResponse | object:
        """Wait for the next answer; `grpc.aio.EOF` is the end."""

    def cancel(self) -> bool:
        """Tell the server to stop."""


class GenerateStream:
    """The events of one request: Started, Deltas, then one Finished for each output.

    Leaving the `async with` block early, or `aclose`, cancels the request at the server.
    """

    def __init__(self, call: StreamCall) -> None:
        """Read from `call`, which is this stream's own."""
        self._call = call
        self._is_closed = False

    def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate over the events that are left."""
        return self

    async def __anext__(self) -> Event:
        """The next event. Raises TriptychError where the stream ends with a status other than OK."""
        while message := await self._read():
            if event := to_event(message):
                return event
        raise StopAsyncIteration

    async def text_deltas(self, output_index: int = 0) -> AsyncIterator[str]:
        """Only the new text of one output."""
        async for event in self:
            if isinstance(event, Delta) and event.output_index == output_index and event.text:
                yield event.text

    async def aclose(self) -> None:
        """Cancel what is left of the request. Does nothing once the stream has ended."""
        self._is_closed = True
        self._call.cancel()

    async def _read(self) -> generate_pb2.GenerateResponse | None:
        if self._is_closed:
            return None
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            self._is_closed = True
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            # gRPC raises the same for a closed call and for a cancelled task; only the second goes on.
            task = asyncio.current_task()
            if self._is_closed and not (task and task.cancelling()):
                return None
            self._is_closed = True
            raise
        if isinstance(message, generate_pb2.GenerateResponse):
            return message
        self._is_closed = True
        return None

    async def __aenter__(self) -> Self:
        """Close the stream at the end of the block."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel what is left of the request."""
        await self.aclose()
