"""The folder of the unix sockets of one stack."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from triptych_kit.config import ConfigError
from triptych_kit.process.setup import runtime_folder


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for this user alone, until the end of the block. Raises ConfigError if there can be none.

    A living stack has a lock on its folder. A process id says nothing of one in another pid namespace.
    """
    parent = runtime_folder()
    if parent is None:
        raise ConfigError("there is no folder for sockets: set XDG_RUNTIME_DIR or TMPDIR to one of this user")
    # Not while another stack is between the folder and its lock.
    with _locked(parent):
        for left in parent.glob("serve-*.sockets"):
            _remove_unless_locked(left)
        folder = Path(tempfile.mkdtemp(prefix="serve-", suffix=".sockets", dir=parent))
        lock = _opened(folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = _opened(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_unless_locked(folder: Path) -> None:
    with contextlib.suppress(OSError):  # locked, or gone
        descriptor = _opened(folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
