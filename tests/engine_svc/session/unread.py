"""Runs Python whose standard error is a pipe that is full and is not read."""

from __future__ import annotations

import os
import subprocess
import sys

_LIMIT_S = 60.0
_FILL_STDERR = """
import contextlib, os, sys
reader, writer = os.pipe()
os.set_blocking(writer, False)
with contextlib.suppress(BlockingIOError):
    while True:
        os.write(writer, b"x")
os.set_blocking(writer, True)
sys.__stderr__ = os.fdopen(writer, "w")
"""


def exit_code_unread(code: str) -> int:
    """What a process that runs `code` there ends with. Raises subprocess.TimeoutExpired."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _FILL_STDERR + code]
    return subprocess.run(command, env=environment, timeout=_LIMIT_S, check=False).returncode
