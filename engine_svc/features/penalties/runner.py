"""Rows with penalties. The op defines their formulas.

Penalties are a pure function of a row's logits and its known tokens, so only parameters are kept per row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.core.step import AdmittedRequest
from engine_svc.features.penalties.extras import Penalties
from engine_svc.runner.feature import LogitRows, RunnerContext, RunnerFeature
from engine_svc.runner.sampling.transfer import Ints, to_device
from triptych_kernels import Penalised

Penalise = Callable[[Tensor, Tensor, Penalised, Tensor], None]


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature:
    return PenaltyRows(context.max_num_seqs, context.device, context.ops.penalise)


class PenaltyRows(RunnerFeature):
    """The rows with penalties, and their parameters."""

    def __init__(self, max_num_seqs: int, device: torch.device, penalise: Penalise) -> None:
        self._device = device
        self._penalise = penalise
        # Rows are presence, frequency, repetition.
        self._amounts = np.zeros((3, max_num_seqs), dtype=np.float32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        # Steps mostly have the rows of the step before.
        self._latest: tuple[LogitRows, Penalised] | None = None

    def uses(self, admitted: AdmittedRequest) -> bool:
        return Penalties in admitted.extras

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        penalties: Penalties = admitted.extras[Penalties]
        self._amounts[:, row] = penalties.presence, penalties.frequency, penalties.repetition
        self._num_prompt_tokens[row] = admitted.num_prompt_tokens

    def example(self) -> Penalties:
        return Penalties(presence=1.0)

    def apply(self, logits: Tensor, logit_rows: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        if self._latest is None or self._latest[0] is not logit_rows:
            self._latest = logit_rows, self._penalised(logit_rows)
        self._penalise(logits, token_ids, self._latest[1], to_device(positions, self._device))

    def _penalised(self, logit_rows: LogitRows) -> Penalised:
        columns = np.stack([logit_rows.entries, logit_rows.rows, self._num_prompt_tokens[logit_rows.rows]])
        entries, rows, num_prompt_tokens = to_device(columns, self._device)
        return Penalised(
            entries, rows, num_prompt_tokens, to_device(self._amounts[:, logit_rows.rows], self._device)
        )
