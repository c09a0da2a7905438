"""The file that says that a verb is ready, and where its processes are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


def remove_ready_file(path: str | None) -> None:
    """Called before anything starts, since a killed run leaves its file, and before anything stops."""
    if path is not None:
        Path(path).unlink(missing_ok=True)


def write_ready_file(path: str | None, record: Mapping[str, object]) -> None:
    """Write the addresses, if a path is given; atomically, so that no reader sees a partial file."""
    if path is None:
        return
    file = Path(path)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(file)
