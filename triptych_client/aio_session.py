"""A session: turns over one call, each of which continues all tokens before it. Knows no channel."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self, Unpack

import grpc

from triptych.api.v1 import inference_pb2
from triptych_client.aio_waiting import Closing, SentMessages, StreamCall
from triptych_client.errors import TriptychError, from_rpc_error
from triptych_client.events import Event, Finished, to_event
from triptych_client.generate_request import (
    GenerateOptions,
    SamplingOptions,
    SessionPrompt,
    build_session_message,
)


class Session:
    """Turns, one at a time. An error ends it, as does leaving the `async with` block, or `aclose`."""

    def __init__(self, start: Callable[[SentMessages], StreamCall], options: GenerateOptions) -> None:
        """Make the call. `options` are those of each turn."""
        self._options = options
        self._closing = Closing()
        self._sent = SentMessages()
        self._call = start(self._sent)
        self._num_inputs = self._num_ended = 0

    def generate(self, prompt: SessionPrompt, **options: Unpack[SamplingOptions]) -> AsyncIterator[Event]:
        """Add a text or token ids, and stream the turn that continues all tokens.

        `options` replace those of the session for this turn. What is unread of the turn before is dropped.
        """
        is_first = not self._num_inputs
        self._sent.put(build_session_message(prompt, self._options, options, is_first=is_first))
        self._num_inputs += 1
        return self._turn(self._num_inputs)

    def cancel_turn(self) -> None:
        """End the turn that runs, with the reason `abort`; the next one continues what it has sampled."""
        self._sent.put(inference_pb2.GenerateSessionRequest(cancel_turn={}))

    async def aclose(self) -> None:
        """End it, and the turn that runs."""
        self._closing.set()
        self._sent.end()
        self._call.cancel()

    async def _turn(self, number: int) -> AsyncIterator[Event]:
        while self._num_ended < number and (message := await self._read()) is not None:
            event, is_own = to_event(message.response), self._num_ended == number - 1
            self._num_ended += isinstance(event, Finished)
            if event is not None and is_own:
                yield event

    async def _read(self) -> inference_pb2.GenerateSessionResponse | None:
        """The next message; None if the session was closed here."""
        try:
            message = None if self._closing.is_set() else await self._closing.read(self._call)
        except grpc.RpcError as error:
            self._sent.end()
            if self._closing.is_set():
                return None
            raise from_rpc_error(error) from error
        if isinstance(message, inference_pb2.GenerateSessionResponse):
            return message
        if not self._closing.is_set():
            raise TriptychError(grpc.StatusCode.CANCELLED, "the session has ended")
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
