"""Both ends of the connection between an engine and one of its ranks: one JSON object per message.

Knows no plans and no model.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import deque
from collections.abc import Mapping
from typing import cast

from engine_svc.core.errors import RequestFailed

_RECEIVE_BYTES = 1 << 16

# A process that ends because its parent has closed the connection has nothing to report.
_EXIT_ALONE = 0

RankMessage = dict[str, object]


class RankConnection:
    """Exchanges messages while a rank starts. Afterwards the rank only detects that the engine closed it."""

    def __init__(self, connection: socket.socket) -> None:
        self.is_open = True  # by the other end
        self._socket = connection
        self._writing = threading.Lock()
        self._unread = b""
        self._messages: deque[RankMessage] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message, from any thread. Raises EOFError if the other end has closed the connection."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._writing:
                self._socket.sendall(data)
        except OSError as error:
            raise EOFError("the other end of the connection to a rank is closed") from error

    def receive(self) -> RankMessage:
        """Wait for a message. Raises EOFError if the other end has closed the connection."""
        while not self._messages:
            self._messages.extend(self.receive_ready())
            if not self.is_open:
                raise EOFError("the other end of the connection to a rank is closed")
        return self._messages.popleft()

    def receive_ready(self) -> list[RankMessage]:
        """Messages that are complete once the connection is readable."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except ConnectionResetError:
            data = b""
        self.is_open = bool(data)
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end_with_it(self) -> None:
        """Exit this process at once when the engine closes the connection, even in a step."""

        def wait() -> None:
            try:
                while self._socket.recv(_RECEIVE_BYTES):
                    pass
            except OSError:
                pass
            os._exit(_EXIT_ALONE)

        threading.Thread(target=wait, name="parent-connection", daemon=True).start()


def write_prepared(number: int, failure: RequestFailed | None) -> RankMessage:
    """The message of a rank that has prepared what a request waits for, or cannot."""
    if failure is None:
        return {"prepared": [number]}
    return {"prepared": [number, failure.code, failure.message, failure.reason, failure.field]}


def read_prepared(message: RankMessage) -> tuple[int, RequestFailed | None]:
    number, *status = cast("tuple[int, str, str, str, str]", message["prepared"])
    if not status:
        return number, None
    code, text, reason, field = status
    return number, RequestFailed(code, text, reason, field)
