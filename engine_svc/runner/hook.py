"""Interfaces for optional features of a step on the device. Declared here, by their user."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine_svc.core.step import StepPlan
from engine_svc.runner.input_batch import InputBatch
from engine_svc.runner.sampling.transfer import Ints


class RunnerHook(Protocol):
    """Called before and after a forward."""

    def before_forward(self, plan: StepPlan, batch: InputBatch) -> None:
        """The batch holds the plan's rows; nothing is computed yet."""

    def after_forward(self, plan: StepPlan, batch: InputBatch) -> None:
        """The step's keys and values are in the cache; nothing is sampled yet."""


class LogitsProcessor(Protocol):
    """Changes the logits before sampling."""

    def __call__(self, logits: Tensor, rows: Ints) -> Tensor:
        """Returns the logits [N, V] fp32 to use; may write the given ones. Entry n is of row rows[n].

        The given logits are valid for this step only: the next one overwrites them.
        """
