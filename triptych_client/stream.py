"""A stream of events that is read by iterating and cancelled by closing. Knows no channel."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

import grpc

from triptych.api.v1 import generate_pb2
from triptych_client.errors import from_rpc_error
from triptych_client.events import Delta, Event, to_event


class StreamCall(Protocol):
    """What gRPC's blocking calls with many answers can do."""

    def __next__(self) -> generate_pb2.GenerateResponse:
        """Wait for the next answer."""

    def cancel(self) -> bool:
        """Tell the server to stop."""


class GenerateStream:
    """The events of one request: Started, Deltas, then one Finished for each output.

    Leaving the `with` block early, or `close`, cancels the request at the server.
    """

    def __init__(self, call: StreamCall) -> None:
        """Read from `call`, which is this stream's own."""
        self._call = call
        self._is_closed = False

    def __iter__(self) -> Iterator[Event]:
        """Iterate over the events that are left."""
        return self

    def __next__(self) -> Event:
        """The next event. Raises TriptychError where the stream ends with a status other than OK."""
        while not self._is_closed:
            try:
                event = to_event(next(self._call))
            except grpc.RpcError as error:
                if self._is_closed:
                    break
                self._is_closed = True
                raise from_rpc_error(error) from error
            if event is not None:
                return event
        raise StopIteration

    def text_deltas(self, output_index: int = 0) -> Iterator[str]:
        """Only the new text of one output."""
        for event in self:
            if isinstance(event, Delta) and event.output_index == output_index and event.text:
                yield event.text

    def close(self) -> None:
        """Cancel what is left of the request. Does nothing once the stream has ended."""
        self._is_closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        """Close the stream at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel what is left of the request."""
        self.close()
