"""Waiting in the blocking client: for a channel, for time, and for answers until a stream is closed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Protocol

import grpc
from google.protobuf.message import Message

sleep = time.sleep


class StreamCall(Protocol):
    """The part of a streaming call that is used here."""

    def __next__(self) -> Message:
        """Wait for the next answer."""

    def cancel(self) -> bool:
        """Cancel the call at the server."""


class Closing(threading.Event):
    """Set when a stream is closed, by any thread, which ends its waits."""

    def is_set_within(self, delay_s: float) -> bool:
        return self.wait(delay_s)

    def read(self, call: StreamCall) -> Message | None:
        """The next answer of `call`; None at its end."""
        return next(call, None)


class SentMessages:
    """The messages that a client streams, as they come. A thread of gRPC waits for the next one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        self._queue.put(message)

    def end(self) -> None:
        """Let none follow."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        message = self._queue.get()
        if message is None:
            raise StopIteration
        return message


def channel_ready(channel: grpc.Channel, timeout_s: float) -> None:
    """Wait until `channel` is connected. Raises TimeoutError."""
    try:
        grpc.channel_ready_future(channel).result(timeout=timeout_s)
    except grpc.FutureTimeoutError as error:
        raise TimeoutError from error
