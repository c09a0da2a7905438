"""A port for processes that must know each other's address before they start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_FIRST_PORT = 10_000
_NUM_ATTEMPTS = 100


def free_port() -> int:
    """A loopback port that is free and that the kernel gives to no connection in the meantime.

    Not one of those that it gives: to a listener that is not there yet, a connection can be its own peer.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # Where the kernel gives nearly all of them, one of those has to do.
    ports = range(_FIRST_PORT, max(first_given, _FIRST_PORT + _NUM_ATTEMPTS))
    for port in random.SystemRandom().sample(ports, _NUM_ATTEMPTS):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {ports.start} to {ports.stop} is free")
