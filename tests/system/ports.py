"""A port for processes that must know each other's address before they start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A loopback port that was free just now and that the kernel will not hand out again soon."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
