"""The file that says that a verb is ready, and where its processes are.

A running `serve` has one in the user's runtime folder, too, so that `admin` finds its services by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from service_kit.process import runtime_folder


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


def runtime_file() -> str | None:
    """The file of this process in the user's runtime folder; None if there can be no such folder."""
    folder = runtime_folder()
    return None if folder is None else str(folder / f"serve-{os.getpid()}.json")


def running_services() -> dict[str, list[str]]:
    """The admin addresses of the services of all running `serve`, by names such as engine-0."""
    found: dict[str, list[str]] = {}
    folder = runtime_folder()
    if folder is None:
        return found
    for path in sorted(folder.glob("serve-*.json")):
        with suppress(OSError, ValueError):
            os.kill(int(path.stem.removeprefix("serve-")), 0)
            for process in json.loads(path.read_text(encoding="utf-8"))["processes"]:
                name = f"{process['service']}-{process['index']}"
                found.setdefault(name, []).append(process["admin_address"])
    return found
