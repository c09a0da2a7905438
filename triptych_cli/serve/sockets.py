"""The folder of the unix sockets of one stack."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from triptych_kit.config import ConfigError
from triptych_kit.process.setup import runtime_folder


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for this user alone, until the end of the block. Raises ConfigError if there can be none."""
    parent = runtime_folder()
    if parent is None:
        raise ConfigError("there is no folder for sockets: set XDG_RUNTIME_DIR or TMPDIR to one of this user")
    for left in parent.glob("serve-*.sockets"):
        # Of a process that was killed.
        if not Path(f"/proc/{left.stem.removeprefix('serve-')}").exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = parent / f"serve-{os.getpid()}.sockets"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
