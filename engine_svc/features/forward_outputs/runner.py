"""Keeps hidden states and chosen experts of a step for the rows that ask for them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.core.step import AdmittedRequest
from engine_svc.features.forward_outputs.extras import ForwardOutputs, ForwardOutputSpec, PositionRun
from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.runner.feature import PendingPart, RunnerContext, RunnerFeature
from engine_svc.runner.input_batch import StepInputs
from engine_svc.runner.sampling.transfer import to_host


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature | None:
    return ForwardOutputRows() if config.max_forward_output_bytes else None


class ForwardOutputRows(RunnerFeature):
    """The rows that ask for either."""

    def __init__(self) -> None:
        self._rows: dict[int, ForwardOutputSpec] = {}
        self._choices: list[Tensor] | None = None  # of the step that runs

    def uses(self, admitted: AdmittedRequest) -> bool:
        return ForwardOutputSpec in admitted.extras

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        self._rows[row] = admitted.extras[ForwardOutputSpec]

    def remove_row(self, row: int) -> None:
        self._rows.pop(row, None)

    def before_forward(self, inputs: StepInputs, context: ForwardContext) -> None:
        asking = [spec for row in inputs.rows.tolist() if (spec := self._rows.get(row)) is not None]
        self._choices = [] if any(spec.routed_experts for spec in asking) else None
        context.expert_choices = self._choices

    def after_forward(self, inputs: StepInputs, hidden: Tensor, model: Model) -> PendingPart | None:
        choices, self._choices = self._choices, None
        experts = torch.stack(choices, dim=1).to(torch.int32) if choices else None  # [T, layers, k]
        found: list[tuple[int, int, int, Tensor | None, Tensor | None]] = []
        starts, counts = inputs.starts.tolist(), inputs.counts.tolist()
        begin = 0
        for row, start, count in zip(inputs.rows.tolist(), starts, counts, strict=True):
            tokens = slice(begin, begin + count)
            begin += count
            spec = self._rows.get(row)
            if spec is None:
                continue
            if spec.routed_experts and experts is None:
                raise ValueError("the forward has reported no choice of experts")
            # A forward may write to the memory of its last result again.
            states = to_host(hidden[tokens].to(torch.float32, copy=True)) if spec.hidden_states else None
            chosen = to_host(experts[tokens]) if spec.routed_experts and experts is not None else None
            found.append((row, start, count, states, chosen))
        if not found:
            return None
        return lambda: {
            row: ForwardOutputs((_run(start, count, states, chosen),))
            for row, start, count, states, chosen in found
        }


def _run(start: int, count: int, states: Tensor | None, chosen: Tensor | None) -> PositionRun:
    return PositionRun(
        start,
        count,
        b"" if states is None else states.numpy().tobytes(),
        b"" if chosen is None else chosen.numpy().tobytes(),
        0 if chosen is None else chosen.shape[1],
    )
