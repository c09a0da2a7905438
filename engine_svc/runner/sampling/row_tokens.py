"""Token ids kept for some rows, and their indices in a step's logits. Knows not what they are used for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_svc.runner.feature import LogitRows
from engine_svc.runner.sampling.transfer import Ints, to_device

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LogitPositions:
    """Indices of the kept ids in the flattened logits of a step.

    rows: [P] int64, the logits' rows that have any.  flat: [S] int64, row * V + id.  amounts: [S] fp32.
    """

    rows: Tensor
    flat: Tensor
    amounts: Tensor


class RowTokens:
    """A list of ids per row, each with an amount. Ids outside of the vocabulary are left out."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._kept: dict[int, tuple[Ints, _Floats]] = {}
        # Steps mostly have the rows of the step before.
        self._latest_rows: LogitRows | None = None
        self._latest: LogitPositions | None = None

    def put(self, row: int, token_ids: Iterable[int], amounts: Iterable[float] | None = None) -> None:
        """Set the ids of a row, each at most once."""
        ids = np.fromiter(token_ids, dtype=np.int64)
        values = np.zeros(len(ids), np.float32) if amounts is None else np.fromiter(amounts, np.float32)
        is_known = (ids >= 0) & (ids < self._vocab_size)
        self._kept[row] = ids[is_known], values[is_known]
        self._latest_rows = None

    def drop(self, row: int) -> None:
        if self._kept.pop(row, None) is not None:
            self._latest_rows = None

    def logit_positions(self, logit_rows: LogitRows) -> LogitPositions | None:
        """Indices of the kept ids of these rows in the step's logits [N, V], if any."""
        if not self._kept:
            return None
        if logit_rows is not self._latest_rows:
            self._latest_rows, self._latest = logit_rows, self._find(logit_rows)
        return self._latest

    def _find(self, logit_rows: LogitRows) -> LogitPositions | None:
        pairs = [
            (entry, row)
            for entry, row in zip(logit_rows.entries.tolist(), logit_rows.rows.tolist(), strict=True)
            if row in self._kept
        ]
        if not pairs:
            return None
        flat = [self._kept[row][0] + entry * self._vocab_size for entry, row in pairs]
        return LogitPositions(
            to_device(np.array([entry for entry, _ in pairs], dtype=np.int64), self._device),
            to_device(np.concatenate(flat), self._device),
            to_device(np.concatenate([self._kept[row][1] for _, row in pairs]), self._device),
        )
