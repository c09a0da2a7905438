"""Finding who holds a port."""

from __future__ import annotations

import os
import socket

from launcher.serve.port_owner import find_port_owner


def test_the_process_that_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        owner = find_port_owner("127.0.0.1", server.getsockname()[1])
    assert owner is not None
    assert owner.pid == os.getpid()
    assert "pytest" in str(owner)


def test_a_free_port_has_no_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert find_port_owner("127.0.0.1", port) is None


def test_a_port_that_the_kernel_chooses_is_free() -> None:
    assert find_port_owner("127.0.0.1", 0) is None
