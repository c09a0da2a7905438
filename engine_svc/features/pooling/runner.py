"""Gathers the states of prompts over the steps that compute them, and makes their results in the last."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.core.errors import RequestFailed
from engine_svc.core.step import AdmittedRequest
from engine_svc.features.pooling.extras import ITEM_BYTES, MAX_QUERY_BYTES, PooledResult, PoolingRequest
from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.model.pooler import Pooler, PoolingModel, pooled
from engine_svc.runner.feature import PendingPart, RunnerContext, RunnerFeature
from engine_svc.runner.input_batch import StepInputs
from engine_svc.runner.sampling.transfer import to_device, to_host


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature:
    return PoolingRows()


_NOT_FINITE = "the model's states are not finite"
_BLOCK_ROWS = 1024  # of an input that a query is compared with at once
_Key: TypeAlias = tuple[str, str]  # late_scope, late_key


@dataclass(slots=True)
class _Row:
    """states: [T, H] of each earlier step, as far as the result needs them.

    query: [Q, D], vectors that those of the prompt are compared with for a score.
    """

    request: PoolingRequest
    num_prompt_tokens: int
    query: Tensor | None = None
    states: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Query:
    """Vectors [Q, D] that are kept, cut to these dimensions; None: whole."""

    vectors: Tensor
    num_dimensions: int | None


@dataclass(frozen=True, slots=True)
class _LateScore:
    """What is prepared of a request for a score by a key."""

    request: PoolingRequest
    query: Tensor


def late_score(query: Tensor, vectors: Tensor) -> Tensor:
    """The sum [1] over the query's vectors [Q, D] of their largest product with one of `vectors` [T, D]."""
    largest = [(query @ block.t()).amax(1) for block in vectors.split(_BLOCK_ROWS)]
    return torch.stack(largest).amax(0).sum()[None]


class PoolingRows(RunnerFeature):
    """The rows that have a result in place of tokens."""

    prepares = PoolingRequest

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._queries = _Queries()

    def on_model(self, model: Model) -> None:
        self._queries.clear()

    def prepare(self, extra: PoolingRequest) -> _LateScore:
        """Raises RequestFailed where no vectors are kept under the key."""
        query = self._queries.get(_key_of(extra))
        if query is None:
            raise RequestFailed(
                "NOT_FOUND",
                f"pooling.late_interaction_key is {extra.late_key!r}, under which no vectors are kept: "
                "send the query first, with the task token_embed",
                field="pooling.late_interaction_key",
            )
        if query.num_dimensions != extra.num_dimensions:
            raise RequestFailed(
                "INVALID_ARGUMENT",
                f"pooling.dimensions is {extra.num_dimensions or 'unset'}, must be as of the query under "
                f"{extra.late_key!r}, {query.num_dimensions or 'unset'}",
                field="pooling.dimensions",
            )
        return _LateScore(extra, query.vectors)

    def uses(self, admitted: AdmittedRequest) -> bool:
        return PoolingRequest in admitted.extras

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        wanted = admitted.extras[PoolingRequest]
        if isinstance(wanted, _LateScore):
            self._rows[row] = _Row(wanted.request, admitted.num_prompt_tokens, wanted.query)
        else:
            self._rows[row] = _Row(wanted, admitted.num_prompt_tokens)

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
            complete.setdefault(row.request.computed(), []).append((row_index, whole))
        if not complete:
            return None
        made = [self._made(pooler, request, rows) for request, rows in complete.items()]
        shapes = {row_index: shape for of_rows, _ in made for row_index, shape in of_rows.items()}
        # One copy to the host for all rows.
        numbers = to_host(torch.cat([flat for _, flat in made]))
        return lambda: _to_extras(shapes, numbers)

    def _made(
        self, pooler: Pooler, request: PoolingRequest, rows: Sequence[tuple[int, Tensor]]
    ) -> tuple[dict[int, tuple[int, ...]], Tensor]:
        """The shape of each row's result, and the numbers of all of them in order, fp32.

        rows: those of equal requests, with the states [T, H] of whole prompts.
        """
        made = _computed(pooler, request, [states for _, states in rows])
        if not request.is_per_token:
            shape = tuple(made.shape[1:])
            return {row_index: shape for row_index, _ in rows}, made.flatten()
        parts = made.split([len(states) for _, states in rows])
        results = {
            row_index: self._finished(self._rows[row_index], part)
            for (row_index, _), part in zip(rows, parts, strict=True)
        }
        shapes = {row_index: tuple(result.shape) for row_index, result in results.items()}
        return shapes, torch.cat([result.flatten() for result in results.values()])

    def _finished(self, row: _Row, result: Tensor) -> Tensor:
        """The vectors, or the score [1] where they are compared with a query."""
        if row.query is not None:
            return late_score(row.query, result)
        if row.request.late_key:
            self._queries.keep(_key_of(row.request), _Query(result.clone(), row.request.num_dimensions))
        return result


class _Queries:
    """Vectors of queries by key, the newest last; the oldest go where they take too much memory.

    Preparing threads read what steps keep. A read changes no order, so that all ranks forget the same.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, _Query] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: _Key) -> _Query | None:
        with self._lock:
            return self._kept.get(key)

    def keep(self, key: _Key, query: _Query) -> None:
        with self._lock:
            if (replaced := self._kept.pop(key, None)) is not None:
                self._num_bytes -= replaced.vectors.nbytes
            self._kept[key] = query
            self._num_bytes += query.vectors.nbytes
            while self._num_bytes > MAX_QUERY_BYTES and len(self._kept) > 1:
                self._num_bytes -= self._kept.popitem(last=False)[1].vectors.nbytes

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0


def _computed(pooler: Pooler, request: PoolingRequest, states: Sequence[Tensor]) -> Tensor:
    """The results of prompts with these states [T, H], fp32: [R, D], or [all T, D] where tokens have them."""
    normalizes = pooler.spec.normalizes if request.normalizes is None else request.normalizes
    if request.is_per_token:
        flat = torch.cat(list(states))
    elif request.task == "embed":
        flat = pooled(pooler.spec.method, states)
    else:
        flat = pooled("cls" if pooler.spec.is_encoder else "last", states)
    if request.task in ("embed", "token_embed"):
        return pooler.embed(flat, normalize=normalizes, num_dimensions=request.num_dimensions)
    activates = pooler.spec.activates if request.activates is None else request.activates
    return pooler.scores(flat, activate=activates)


def _key_of(request: PoolingRequest) -> _Key:
    return request.late_scope, request.late_key


def _to_extras(shapes: Mapping[int, tuple[int, ...]], numbers: Tensor) -> dict[int, PooledResult | str]:
    """The results by row, or why there is none. numbers: [N] fp32, of all of them, in order."""
    content = numbers.numpy().tobytes()
    # Of all at once: a call of torch for each row would cost more than the rest.
    are_finite = bool(numbers.isfinite().all())
    results: dict[int, PooledResult | str] = {}
    end = 0
    for row, shape in shapes.items():
        start, end = end, end + math.prod(shape)
        if are_finite or numbers[start:end].isfinite().all():
            results[row] = PooledResult(shape, content[ITEM_BYTES * start : ITEM_BYTES * end])
        else:
            results[row] = _NOT_FINITE
    return results
