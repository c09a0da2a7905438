"""Rows with presence, frequency and repetition penalties. The op defines their formulas.

Penalties are a pure function of a row's logits and its tokens so far. Only parameters are kept per row, so a
request that continues in another engine gets the same penalties.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine_svc.core.sampling_params import SamplingParams
from engine_svc.runner.sampling.transfer import Ints, to_device
from triptych_kernels import Penalised

Penalise = Callable[[Tensor, Tensor, Penalised, Tensor], None]


class Penalties:
    """The rows with penalties, and their parameters."""

    def __init__(self, max_num_seqs: int, device: torch.device, penalise: Penalise) -> None:
        self._device = device
        self._penalise = penalise
        self._rows: set[int] = set()
        self._asks = np.zeros(max_num_seqs, dtype=bool)
        # Rows are presence, frequency, repetition.
        self._amounts = np.zeros((3, max_num_seqs), dtype=np.float32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        # Steps mostly have the rows of the step before.
        self._latest_rows = b""
        self._latest: tuple[Ints, Penalised] | None = None

    def enter(self, row: int, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """Set the parameters of a row, if it has penalties."""
        if not sampling.has_penalties:
            return
        self._rows.add(row)
        self._asks[row] = True
        self._amounts[:, row] = (
            sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty,
        )  # fmt: skip
        self._num_prompt_tokens[row] = num_prompt_tokens
        self._latest_rows = b""

    def leave(self, row: int) -> None:
        if row in self._rows:
            self._rows.remove(row)
            self._asks[row] = False
            self._latest_rows = b""

    def apply(self, logits: Tensor, rows: Ints, positions: Ints, token_ids: Tensor) -> None:
        """Change the logits [N, V] of seen tokens, in place. token_ids[rows[n], :positions[n]] were seen."""
        if not self._rows:
            return
        key = rows.tobytes()
        if key != self._latest_rows:
            self._latest_rows, self._latest = key, self._find(rows)
        if self._latest is not None:
            entries, penalised = self._latest
            self._penalise(logits, token_ids, penalised, to_device(positions[entries], self._device))

    def _find(self, rows: Ints) -> tuple[Ints, Penalised] | None:
        entries = self._asks[rows].nonzero()[0]
        if not len(entries):
            return None
        asking = rows[entries]
        on_device, asking_rows, num_prompt_tokens = to_device(
            np.stack([entries, asking, self._num_prompt_tokens[asking]]), self._device
        )
        amounts = to_device(self._amounts[:, asking], self._device)
        return entries, Penalised(on_device, asking_rows, num_prompt_tokens, amounts)
