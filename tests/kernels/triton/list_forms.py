"""A program that lists what steps of all sizes make Triton compile, with no GPU at hand and nothing compiled.

    python -m tests.kernels.triton.list_forms

Prints JSON: for each kernel the number of its forms.
"""

from __future__ import annotations

import json

import numpy as np
import torch
from triton import knobs
from triton.runtime import driver

from engine_svc.core.step import AdmittedRequest
from engine_svc.features.penalties.runner import PenaltyRows
from engine_svc.runner.feature import LogitRows
from engine_svc.runner.sampling.parameters import DrawParameters
from tests.engine_svc.request_options import split_options
from tests.kernels.triton.compile_all import AbsentGPU
from triptych_kernels import AttentionBatch, Ops
from triptych_kernels.triton import triton_ops

_MAX_ROWS = 17
_VOCAB_SIZE = 100
_CPU = torch.device("cpu")


def list_forms() -> dict[str, int]:
    """How many forms of each kernel steps of 1 to _MAX_ROWS rows ask for."""
    forms: dict[str, set[str]] = {}

    def note(*, key: str, fn, **_: object) -> bool:
        forms.setdefault(fn.name.rpartition(".")[2], set()).add(str(key))
        # As if it were compiled already.
        return True

    driver.set_active(AbsentGPU())
    knobs.runtime.jit_cache_hook = note
    ops = triton_ops()
    for num_rows in range(1, _MAX_ROWS + 1):
        sample(ops, num_rows)
        attend(ops, num_rows)
    return {name: len(keys) for name, keys in forms.items()}


def sample(ops: Ops, num_rows: int) -> None:
    """A step in which all rows draw and are penalised."""
    parameters = DrawParameters(num_rows, _CPU)
    penalties = PenaltyRows(num_rows, _CPU, ops.penalise)
    for row in range(num_rows):
        sampling, extras = split_options(temperature=1.0, top_p=0.9, presence_penalty=1.0, seed=row)
        parameters.enter(row, sampling)
        penalties.add_row(row, AdmittedRequest(str(row), [1, 2, 3], 3, sampling, [[]], extras))
    rows, positions = np.arange(num_rows), np.full(num_rows, 5)
    columns = parameters.columns(rows, positions)
    logits = torch.zeros(num_rows, _VOCAB_SIZE)
    token_ids = torch.zeros(num_rows, 64, dtype=torch.int32)
    penalties.apply(logits, LogitRows(rows, rows), positions, token_ids)
    ops.greedy(logits)
    uniforms = torch.zeros(num_rows, dtype=torch.float64)
    ops.sample(logits, columns.temperature, columns.top_k, columns.top_p, columns.min_p, uniforms)


def attend(ops: Ops, num_rows: int) -> None:
    """A decode step of a model with two groups of layers, whose block tables lie behind each other."""
    keys = torch.zeros(4, 1, 16, 16)
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    totals = torch.full((num_rows,), 9, dtype=torch.int32)
    for table in torch.zeros(2, num_rows, 3, dtype=torch.int32).unbind():
        batch = AttentionBatch(table[:, :1], starts, totals, 16, 1, 9)
        ops.paged_attention(torch.zeros(num_rows, 2, 16), keys, keys, batch, scale=0.1)


if __name__ == "__main__":
    print(json.dumps(list_forms()))
