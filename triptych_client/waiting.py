"""Waiting in the blocking client: for a channel, for time, and for answers until a stream is closed."""

from __future__ import annotations

import threading
import time
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


def channel_ready(channel: grpc.Channel, timeout_s: float) -> None:
    """Wait until `channel` is connected. Raises TimeoutError."""
    try:
        grpc.channel_ready_future(channel).result(timeout=timeout_s)
    except grpc.FutureTimeoutError as error:
        raise TimeoutError from error
