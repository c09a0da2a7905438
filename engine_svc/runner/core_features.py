"""Sampling parameters that change logits in every engine, a stage each.

A stage that finds its parameter in `Parameters` needs no other file: the contract has its field and rules,
with `passed_on`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine_svc.core.step import AdmittedRequest
from engine_svc.runner.feature import LogitRows, RunnerContext, RunnerFeature
from engine_svc.runner.sampling.row_tokens import RowTokens
from engine_svc.runner.sampling.transfer import Ints


def with_core_features(
    features: Sequence[RunnerFeature], context: RunnerContext
) -> tuple[RunnerFeature, ...]:
    """The features of a runner, in the order of application."""
    # First: what a feature forces is forced regardless of `min_tokens`.
    return (MinTokens(context), *features)


class MinTokens(RunnerFeature):
    """Excludes every token that would end a row before its `min_tokens`."""

    def __init__(self, context: RunnerContext) -> None:
        self._ends = RowTokens(context.vocab_size, context.device)
        self._min_lengths: Ints = np.zeros(context.max_num_seqs, dtype=np.int64)  # of rows in _ends

    def uses(self, admitted: AdmittedRequest) -> bool:
        return admitted.sampling.min_tokens > 0 and bool(admitted.sampling.end_token_ids)

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        self._ends.put(row, sorted(admitted.sampling.end_token_ids))
        self._min_lengths[row] = admitted.num_prompt_tokens + admitted.sampling.min_tokens

    def remove_row(self, row: int) -> None:
        self._ends.drop(row)

    def apply(self, logits: Tensor, logit_rows: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        is_below = positions < self._min_lengths[logit_rows.rows]
        if not is_below.any():
            return
        if not is_below.all():
            logit_rows = LogitRows(logit_rows.entries[is_below], logit_rows.rows[is_below])
        if (kept := self._ends.logit_positions(logit_rows)) is not None:
            logits.view(-1).index_fill_(0, kept.flat, float("-inf"))
