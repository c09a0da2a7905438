"""A plugin of engines that goes wrong where a marked request is in the batch. Runs in the engine's process.

A request is marked by the token id at one place of its prompt. Each strike leaves a line in a file, before it
happens: the proof that it did.
"""

from __future__ import annotations

import functools
import os
import signal
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
    FREEZE = 2045  # the step never ends, in each engine that has the request
    MEMORY = 2044  # the kernel ends the process, as it does one that takes all memory


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
    """Give every model runner of this process one more feature; the plugin's entry point."""
    from engine_svc.runner.feature import RunnerFeature
    from engine_svc.runner.model_runner import ModelRunner

    class Strikes(RunnerFeature):
        """Which rows are marked, and what happens where a step has one."""

        def __init__(self, folder: Path) -> None:
            self._folder = folder
            self._marks: dict[int, EngineFault] = {}

        def uses(self, admitted) -> bool:
            return _mark_of(admitted.token_ids[MARKER_POSITION]) is not None

        def add_row(self, row, admitted) -> None:
            self._marks[row] = EngineFault(admitted.token_ids[MARKER_POSITION])

        def remove_row(self, row) -> None:
            self._marks.pop(row, None)

        def before_forward(self, inputs, context) -> None:
            """Raise, end or hang where the step has a request that asks for it."""
            present = {self._marks[row] for row in inputs.rows.tolist() if row in self._marks}
            if EngineFault.RAISE in present:
                self._note(EngineFault.RAISE)
                # The forward raises: an error of this stage would end its own row alone.
                inputs.token_ids = None
            if EngineFault.EXIT in present:
                self._note(EngineFault.EXIT)
                os._exit(_EXIT_CODE)
            if EngineFault.MEMORY in present:
                self._note(EngineFault.MEMORY)
                os.kill(os.getpid(), signal.SIGKILL)
            if EngineFault.FREEZE in present:
                self._note(EngineFault.FREEZE)
                threading.Event().wait()
            if EngineFault.HANG in present and not strike_file(self._folder, EngineFault.HANG).exists():
                self._note(EngineFault.HANG)
                threading.Event().wait()

        def apply(self, logits, some, positions, token_ids) -> None:
            """NaN for the rows of requests that ask for it."""
            for entry, row in zip(some.entries.tolist(), some.rows.tolist(), strict=True):
                if self._marks[row] is EngineFault.NAN:
                    self._note(EngineFault.NAN)
                    logits[entry] = float("nan")

        def _note(self, fault: EngineFault) -> None:
            with strike_file(self._folder, fault).open("a") as file:
                file.write(f"{os.getpid()}\n")
                file.flush()
                os.fsync(file.fileno())

    strikes_of_process = Strikes(Path(os.environ[FOLDER_VARIABLE]))
    build: Callable = ModelRunner.__init__

    @functools.wraps(build)
    def build_with_faults(runner: object, *arguments: object, make_features: Callable, **options: object):
        def with_faults(context: object) -> list[object]:
            return [*make_features(context), strikes_of_process]

        build(runner, *arguments, make_features=with_faults, **options)

    ModelRunner.__init__ = build_with_faults  # type: ignore[method-assign,assignment]


def _mark_of(token_id: int) -> EngineFault | None:
    return next((fault for fault in EngineFault if fault.value == token_id), None)
