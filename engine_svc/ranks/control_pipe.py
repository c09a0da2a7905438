"""A rank's end of the connection to its engine: one JSON object per message. Knows no plans and no model."""

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

# A process that ends because its parent has ended, or has closed the connection, has nothing to report.
_EXIT_ALONE = 0


class RankConnection:
    """Exchanges messages while the rank starts. Afterwards it only detects that the engine has closed it."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._unread = b""

    def send(self, message: Mapping[str, object]) -> None:
        """Raises EOFError if the engine has closed the connection."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the engine has closed the connection to this rank") from error

    def receive(self) -> dict[str, object]:
        """Wait for a message. Raises EOFError if the engine has closed the connection."""
        while b"\n" not in self._unread:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise EOFError("the engine has closed the connection to this rank")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        message: dict[str, object] = json.loads(line)
        return message

    def end_with_it(self) -> None:
        """From now on this process exits at once when the engine closes the connection, even in a step."""

        def wait() -> None:
            try:
                while self._socket.recv(_RECEIVE_BYTES):
                    pass
            except OSError:
                pass
            os._exit(_EXIT_ALONE)

        threading.Thread(target=wait, name="parent-connection", daemon=True).start()


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process, even a stopped one, when the thread that started it ends.

    SIGINT and SIGTERM are ignored: a terminal sends them to all processes, and the parent ends its ranks when
    its requests have ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent ended before prctl was called.
        os._exit(_EXIT_ALONE)
