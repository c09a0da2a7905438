"""A plugin of engines that goes wrong where a marked request is in the batch. Runs in the engine's process.

A request is marked by the token id at one place of its prompt. Each strike leaves a line in a file, before it
happens: the proof that it did.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path

FOLDER_VARIABLE = "CHAOS_FAULT_FOLDER"
MARKER_POSITION = 5
_EXIT_CODE = 86


class EngineFault(Enum):
    """What goes wrong, and the token id that asks for it."""

    RAISE = 2040  # the step raises, as often as the request is in one
    NAN = 2041  # the request's logits are NaN
    EXIT = 2042  # the process is gone, in each engine that has the request
    HANG = 2043  # the step never ends, once


def strike_file(folder: Path, fault: EngineFault) -> Path:
    """Where the strikes of a fault are noted: a line each, with the id of the process."""
    return folder / fault.name.lower()


def strikes(folder: Path, fault: EngineFault) -> int:
    file = strike_file(folder, fault)
    return len(file.read_text().splitlines()) if file.exists() else 0


def write_distribution(folder: Path) -> None:
    """Make `folder` what pip would make of a package with this plugin; for PYTHONPATH."""
    facts = folder / "triptych_chaos-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: triptych-chaos\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[triptych.plugins]\nchaos = {__name__}:install\n")


def install() -> None:
    """Give every model runner of this process a hook and a logits processor; the plugin's entry point."""
    from engine_svc.runner.model_runner import ModelRunner

    struck = _Strikes(Path(os.environ[FOLDER_VARIABLE]))
    build: Callable = ModelRunner.__init__

    @functools.wraps(build)
    def build_with_faults(runner: object, *arguments: object, **options: object) -> None:
        build(runner, *arguments, hooks=[struck], logits_processors=[struck.poison], **options)

    ModelRunner.__init__ = build_with_faults  # type: ignore[method-assign,assignment]


class _Strikes:
    """Looks at each step's rows for marks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._marks: dict[str, EngineFault] = {}
        self._batch = None

    def before_forward(self, plan, batch) -> None:
        """Raise, end or hang where the step has a request that asks for it."""
        self._batch = batch
        for request_id in plan.released:
            self._marks.pop(request_id, None)
        for admitted in plan.admitted:
            if (fault := _mark_of(admitted.token_ids[MARKER_POSITION])) is not None:
                self._marks[admitted.request_id] = fault
        present = {self._marks[request_id] for request_id in plan.request_ids if request_id in self._marks}
        if EngineFault.RAISE in present:
            self._note(EngineFault.RAISE)
            raise RuntimeError("a marked request is in the batch")
        if EngineFault.EXIT in present:
            self._note(EngineFault.EXIT)
            os._exit(_EXIT_CODE)
        if EngineFault.HANG in present and not strike_file(self._folder, EngineFault.HANG).exists():
            self._note(EngineFault.HANG)
            threading.Event().wait()

    def after_forward(self, plan, batch) -> None:
        """Nothing goes wrong there."""

    def poison(self, logits, rows):
        """NaN for the rows of requests that ask for it."""
        if self._batch is None:
            return logits
        marks = self._batch.token_ids[:, MARKER_POSITION]
        for place, row in enumerate(rows):
            if marks[row] == EngineFault.NAN.value:
                self._note(EngineFault.NAN)
                logits[place] = float("nan")
        return logits

    def _note(self, fault: EngineFault) -> None:
        with strike_file(self._folder, fault).open("a") as file:
            file.write(f"{os.getpid()}\n")
            file.flush()
            os.fsync(file.fileno())


def _mark_of(token_id: int) -> EngineFault | None:
    return next((fault for fault in EngineFault if fault.value == token_id), None)
