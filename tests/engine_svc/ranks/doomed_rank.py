"""A rank that does with its process or its line what its first message says."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from engine_svc.ranks.control_pipe import RankConnection
from triptych_kit.process.stacks import write_when_asked


def main(argv: Sequence[str]) -> int:
    """End by a signal, or say something and wait for the end."""
    write_when_asked()
    raw = socket.socket(fileno=int(argv[0]))
    connection = RankConnection(raw)
    spec: dict[str, Any] = connection.receive()
    if "signal" in spec:
        os.kill(os.getpid(), spec["signal"])
    raw.sendall(spec["says"].encode())
    connection.receive()
    return 0
