"""A copy of the tree to break things in, and the process that runs tests there. The tree is only read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant
from tests.mutation.worker import SURVIVED

ROOT = Path(__file__).resolve().parents[2]
BASELINE_LIMIT_S = 600.0
_COPIED = ("engine_svc", "service_kit", "protos", "kernels", "tests", "benchmarks", "pyproject.toml")
_NOT_COPIED = ("__pycache__", "node_modules", "results", ".*")

Stages = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutant: the outcome, in which stage of the tests, and which of them failed."""

    mutant: Mutant
    outcome: str
    stage: int | None
    test: str | None

    @property
    def is_killed(self) -> bool:
        """Whether the tests noticed."""
        return self.outcome != SURVIVED


class CopiedTree:
    """One copy and one process: one mutant at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        _copy(folder)
        places = os.pathsep.join(str(folder / place) for place in (".", "protos", "kernels"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutation.worker"],
            cwd=folder,
            # The order of sets is the same in every run.
            env={**os.environ, "PYTHONPATH": places, "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def warm_up(self, stages: Stages) -> list[float]:
        """Run the original, have the libraries that it imports ready, and return the CPU time of each stage.

        Ends the program when the tests fail by themselves, or test another tree than this copy.
        """
        answer = self._ask(_order(None, "", stages, [BASELINE_LIMIT_S] * len(stages)))
        if answer["outcome"] != SURVIVED:
            raise SystemExit(f"the tests fail without any mutant: {answer['test'] or answer['outcome']}")
        ours = str(self._folder.resolve()) + os.sep
        modules: dict[str, str] = answer["modules"]
        tested = {file for name, file in modules.items() if name.startswith("engine_svc.")}
        if not tested or not all(file.startswith(ours) for file in tested):
            raise SystemExit(f"the tests import {sorted(tested)}, not what is in {ours}")
        self._ask({"import": [name for name, file in modules.items() if not file.startswith(ours)]})
        return [float(cpu_s) for cpu_s in answer["cpu_s"]]

    def judge(self, mutant: Mutant, stages: Stages, limits_s: Sequence[float]) -> Verdict:
        """Run the tests on a mutant, each stage within its CPU time."""
        answer = self._ask(_order(mutant.path, mutant.text, stages, limits_s))
        return Verdict(mutant, answer["outcome"], answer["stage"], answer["test"])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker in {self._folder} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _order(path: str | None, text: str, stages: Stages, limits_s: Sequence[float]) -> dict[str, Any]:
    return {"path": path, "text": text, "stages": stages, "limits_s": limits_s}


def _copy(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        else:
            shutil.copy(source, folder / name)
