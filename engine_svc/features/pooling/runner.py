"""Gathers the states of prompts over the steps that compute them, and makes their results in the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.core.step import AdmittedRequest
from engine_svc.features.pooling.extras import PooledResult, PoolingRequest
from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.model.pooler import Pooler, PoolingModel, pooled
from engine_svc.runner.feature import PendingPart, RunnerContext, RunnerFeature
from engine_svc.runner.input_batch import StepInputs
from engine_svc.runner.sampling.transfer import to_device, to_host


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature:
    return PoolingRows()


@dataclass(slots=True)
class _Row:
    """states: [T, H] of each earlier step, as far as the result needs them."""

    request: PoolingRequest
    num_prompt_tokens: int
    states: list[Tensor] = field(default_factory=list)


class PoolingRows(RunnerFeature):
    """The rows that have a result in place of tokens."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def uses(self, admitted: AdmittedRequest) -> bool:
        return PoolingRequest in admitted.extras

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        self._rows[row] = _Row(admitted.extras[PoolingRequest], admitted.num_prompt_tokens)

    def remove_row(self, row: int) -> None:
        self._rows.pop(row, None)

    def before_forward(self, inputs: StepInputs, context: ForwardContext) -> None:
        types = np.zeros(int(inputs.counts.sum()), dtype=np.int64)
        ends = inputs.counts.cumsum().tolist()
        columns = zip(inputs.rows.tolist(), inputs.starts.tolist(), inputs.counts.tolist(), ends, strict=True)
        for row_index, start, count, end in columns:
            row = self._rows.get(row_index)
            if row is not None and row.request.second_text_start is not None:
                first = min(max(row.request.second_text_start - start, 0), count)
                types[end - count + first : end] = 1
        if types.any():
            context.token_types = to_device(types, inputs.token_ids.device)

    def after_forward(self, inputs: StepInputs, hidden: Tensor, model: Model) -> PendingPart | None:
        pooler = model.pooler if isinstance(model, PoolingModel) else None
        if pooler is None:
            raise ValueError("the model has no pooler")
        complete: dict[PoolingRequest, list[tuple[int, Tensor]]] = {}
        ends = (inputs.starts + inputs.counts).tolist()
        parts = hidden.split(inputs.counts.tolist())
        for row_index, end, states in zip(inputs.rows.tolist(), ends, parts, strict=True):
            row = self._rows.get(row_index)
            if row is None:
                continue
            if end < row.num_prompt_tokens:
                if row.request.is_per_token or pooler.spec.method != "last":
                    # A forward may write to the memory of its last result again.
                    row.states.append(states.clone())
                continue
            whole = torch.cat([*row.states, states]) if row.states else states
            row.states = []
            complete.setdefault(replace(row.request, second_text_start=None), []).append((row_index, whole))
        if not complete:
            return None
        results = [result for request, rows in complete.items() for result in _results(pooler, request, rows)]
        return lambda: {row: _to_extra(tensor) for row, tensor in results}


def _results(
    pooler: Pooler, request: PoolingRequest, rows: Sequence[tuple[int, Tensor]]
) -> list[tuple[int, Tensor]]:
    """The result of each row, on its way to the host. rows: with the states [T, H] of whole prompts."""
    numbers, states = [row for row, _ in rows], [states for _, states in rows]
    normalizes = pooler.spec.normalizes if request.normalizes is None else request.normalizes
    if request.is_per_token:
        flat = torch.cat(states)
    elif request.task == "embed":
        flat = pooled(pooler.spec.method, states)
    else:
        flat = pooled("cls" if pooler.spec.is_encoder else "last", states)
    if request.task in ("embed", "token_embed"):
        made = pooler.embed(flat, normalize=normalizes, num_dimensions=request.num_dimensions)
    else:
        made = pooler.scores(flat)
    made = to_host(made)
    if not request.is_per_token:
        return list(zip(numbers, made.unbind(0), strict=True))
    return list(zip(numbers, made.split([len(one) for one in states]), strict=True))


def _to_extra(tensor: Tensor) -> PooledResult:
    return PooledResult(tuple(tensor.shape), tensor.numpy().tobytes())
