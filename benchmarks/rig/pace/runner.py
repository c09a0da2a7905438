"""Waits before each forward."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.rig.pace import SLOW_FILE, STEP_MS
from engine_svc.config import EngineConfig
from engine_svc.core.step import AdmittedRequest
from engine_svc.model.context import ForwardContext
from engine_svc.runner.feature import RunnerContext, RunnerFeature
from engine_svc.runner.input_batch import StepInputs


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature:
    return Pace(Path(os.environ[SLOW_FILE]), float(os.environ[STEP_MS]) / 1000)


class Pace(RunnerFeature):
    def __init__(self, slow_file: Path, step_s: float) -> None:
        self._slow_file, self._step_s = slow_file, step_s

    def uses(self, admitted: AdmittedRequest) -> bool:
        return True

    def before_forward(self, inputs: StepInputs, context: ForwardContext) -> None:
        if self._slow_file.exists():
            time.sleep(self._step_s)
