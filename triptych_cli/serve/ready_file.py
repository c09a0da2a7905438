"""The file that says that a verb is ready, and where its processes are.

A running `serve` has one in the user's runtime folder, too, so that `admin` finds its services by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from triptych_kit.process.setup import runtime_folder


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


@dataclass(frozen=True, slots=True)
class RunningServe:
    """The admin addresses of the services of a running `serve`, and why others stay down; by names.

    A name is a service and its index, such as engine-0.
    """

    admin_addresses: Mapping[str, str]
    given_up: Mapping[str, str]


def running_serves() -> list[RunningServe]:
    """The ready files of all running `serve` of this user."""
    serves: list[RunningServe] = []
    folder = runtime_folder()
    for path in sorted(folder.glob("serve-*.json")) if folder is not None else ():
        with suppress(OSError, ValueError):
            os.kill(int(path.stem.removeprefix("serve-")), 0)
            record = json.loads(path.read_text(encoding="utf-8"))
            serves.append(
                RunningServe(
                    {f"{one['service']}-{one['index']}": one["admin_address"] for one in record["processes"]},
                    {
                        name: f"{why['num_deaths']} deaths, the last: {why['last_cause']}"
                        for name, why in record.get("given_up", {}).items()
                    },
                )
            )
    return serves
