"""A stack started for a benchmark through the command line, as users start it, and stopped after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_READY_WITHIN_S = 300.0
_STOPPED_WITHIN_S = 30.0
_REPOSITORY = Path(__file__).resolve().parent.parent


class ServeFailed(Exception):
    """The stack did not get ready, or did not stop."""


@dataclass(frozen=True, slots=True)
class Served:
    """Where a running stack listens."""

    grpc_address: str
    pids: dict[str, int]  # by service and index, e.g. "engine-0"
    addresses: dict[str, str]  # of the listeners for peers, by the same names


@contextmanager
def serving(model: Path, flags: Sequence[str] = ()) -> Iterator[Served]:
    """Run `triptych serve MODEL` on a port of the kernel's choice for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        ready_file, log_file = Path(folder, "ready.json"), Path(folder, "log")
        arguments = [str(model), "--port", "0", "--ready-file", str(ready_file), *flags]
        roots = (str(_REPOSITORY), str(_REPOSITORY / "protos"), str(_REPOSITORY / "kernels"))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "launcher.cli", "serve", *arguments],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield _await_ready(process, ready_file, log_file)
        finally:
            _stop(process)


def _await_ready(process: subprocess.Popen[bytes], ready_file: Path, log_file: Path) -> Served:
    deadline = time.monotonic() + _READY_WITHIN_S
    while not ready_file.exists():
        if process.poll() is not None:
            raise ServeFailed(f"serve exited with {process.returncode}:\n{log_file.read_text()}")
        if time.monotonic() > deadline:
            raise ServeFailed(f"serve was not ready within {_READY_WITHIN_S:.0f} s:\n{log_file.read_text()}")
        time.sleep(0.05)
    record = json.loads(ready_file.read_text())
    by_name = {f"{each['service']}-{each['index']}": each for each in record["processes"]}
    pids = {name: each["pid"] for name, each in by_name.items()}
    return Served(record["grpc"], pids, {name: each["address"] for name, each in by_name.items()})


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOPPED_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise ServeFailed(f"serve did not stop within {_STOPPED_WITHIN_S:.0f} s") from None
