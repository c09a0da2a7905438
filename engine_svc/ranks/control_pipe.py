"""A rank's side of the line to the engine: one JSON object a message. Knows no plans and no model."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import threading
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1
_RECEIVE_BYTES = 1 << 16

# A process that ends because its parent has gone, or wants it to, has nothing to tell.
_EXIT_ALONE = 0


class RankConnection:
    """Says and hears messages while the rank starts; afterwards it only hears the end."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._unread = b""

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message. Raises EOFError where the engine has closed the line."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the engine has closed its line to this rank") from error

    def receive(self) -> dict[str, object]:
        """Wait for a message. Raises EOFError where the engine has closed the line."""
        while b"\n" not in self._unread:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise EOFError("the engine has closed its line to this rank")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        message: dict[str, object] = json.loads(line)
        return message

    def end_with_it(self) -> None:
        """From now on this process ends at once when the engine closes the line, whatever it is doing."""

        def wait() -> None:
            try:
                while self._socket.recv(_RECEIVE_BYTES):
                    pass
            except OSError:
                pass
            os._exit(_EXIT_ALONE)

        threading.Thread(target=wait, name="line", daemon=True).start()


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process, even a stopped one, when the thread that started it ends.

    Signals for a whole terminal are the parent's alone: it ends its ranks when its requests have ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before the kernel was asked.
        os._exit(_EXIT_ALONE)
