"""Where optional features attach to a step on the device. Declared here, by their user."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine_svc.core.step import StepPlan
from engine_svc.runner.input_batch import InputBatch


class RunnerHook(Protocol):
    """Told before and after a forward."""

    def before_forward(self, plan: StepPlan, batch: InputBatch) -> None:
        """The batch holds the plan's rows; nothing is computed yet."""

    def after_forward(self, plan: StepPlan, batch: InputBatch) -> None:
        """The step's keys and values are in the cache; nothing is sampled yet."""


class LogitsProcessor(Protocol):
    """Changes what is sampled from."""

    def __call__(self, logits: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        """Logits [N, V] fp32 in place of those given, which may be written; entry n is of row rows[n].

        Those given are of this step alone: the next one writes where they are.
        """
