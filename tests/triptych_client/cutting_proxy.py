"""A TCP proxy that cuts its connections on request, in a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class CuttingProxy:
    """Passes bytes on to an address; `cut` breaks every connection as a lost network does."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._refuses = False
        self.num_connections = 0
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._join(near)

    def cut(self, *, refuses: bool = False) -> None:
        """Break all connections; with `refuses` no new one gets through, either."""
        with self._lock:
            self._refuses = refuses
            broken, self._sockets = self._sockets, []
            for each in broken:
                _break(each)

    def heal(self) -> None:
        with self._lock:
            self._refuses = False

    def close(self) -> None:
        self.cut(refuses=True)
        # Closing alone would leave the thread in its accept.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _join(self, near: socket.socket) -> None:
        with self._lock:
            if self._refuses:
                near.close()
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            self.num_connections += 1
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


@contextmanager
def cutting_proxy(target: str) -> Iterator[CuttingProxy]:
    """A proxy that runs for the length of a test."""
    proxy = CuttingProxy(target)
    thread = threading.Thread(target=proxy.run, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join(timeout=10)


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    _break(source)
    _break(sink)


def _break(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
