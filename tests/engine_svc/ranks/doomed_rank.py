"""A rank that does with its process or its line what its first message says."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from engine_svc.ranks.control_pipe import RankConnection
from service_kit.stacks import write_when_asked


def main() -> None:
    """End by a signal, or say something and wait for the end."""
    write_when_asked()
    fd = int(sys.argv[1])
    connection = RankConnection(fd)
    spec: dict[str, Any] = connection.receive()
    if "signal" in spec:
        os.kill(os.getpid(), spec["signal"])
    with socket.socket(fileno=os.dup(fd)) as raw:
        raw.sendall(spec["says"].encode())
    connection.receive()


if __name__ == "__main__":
    main()
