"""Waiting in the asyncio client: for a channel, for time, and for answers until a stream is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc.aio
from google.protobuf.message import Message

sleep = asyncio.sleep


class StreamCall(Protocol):
    """The part of a streaming call that is used here."""

    async def read(self) -> Message | object:
        """Wait for the next answer; `grpc.aio.EOF` is the end."""

    def cancel(self) -> bool:
        """Cancel the call at the server."""


class Closing(asyncio.Event):
    """Set when a stream is closed, which ends its waits."""

    async def is_set_within(self, delay_s: float) -> bool:
        try:
            async with asyncio.timeout(delay_s):
                return await self.wait()
        except TimeoutError:
            return False

    async def read(self, call: StreamCall) -> Message | None:
        """The next answer of `call`; None at its end."""
        try:
            message = await call.read()
        except asyncio.CancelledError:
            # gRPC raises this for a closed call and for a cancelled task; only the latter must propagate.
            task = asyncio.current_task()
            if self.is_set() and not (task and task.cancelling()):
                return None
            self.set()
            raise
        return message if isinstance(message, Message) else None


class SentMessages:
    """The messages that a client streams, as they come."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()

    def put(self, message: Message) -> None:
        self._queue.put_nowait(message)

    def end(self) -> None:
        """Let none follow."""
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Message]:
        while (message := await self._queue.get()) is not None:
            yield message


async def channel_ready(channel: grpc.aio.Channel, timeout_s: float) -> None:
    """Wait until `channel` is connected. Raises TimeoutError."""
    await asyncio.wait_for(channel.channel_ready(), timeout=timeout_s)
