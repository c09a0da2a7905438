"""Limits reasoning blocks to a number of tokens: when it is used up, the end marker is forced."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.core.step import AdmittedRequest
from engine_svc.features.thinking_budget.extras import ThinkingBudget
from engine_svc.runner.feature import LogitRows, RunnerContext, RunnerFeature
from engine_svc.runner.sampling.transfer import Ints, to_device


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature:
    return ThinkingRows(context.vocab_size, context.device)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row's budget and markers. start: [S] int32.  end: [E] int32.  forced: [E, V], logits for each."""

    num_tokens: int
    start: Tensor
    end: Tensor
    forced: Tensor


class ThinkingRows(RunnerFeature):
    """The rows with a thinking budget.

    The state is computed from the row's tokens in each step, without waiting for the device, so a request
    that continues in another engine behaves the same. Each block has the whole budget.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, _Row] = {}

    def uses(self, admitted: AdmittedRequest) -> bool:
        return ThinkingBudget in admitted.extras

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        budget: ThinkingBudget = admitted.extras[ThinkingBudget]
        end = to_device(np.array(budget.end_token_ids, dtype=np.int32), self._device)
        forced = torch.full((len(end), self._vocab_size), float("-inf"), device=self._device)
        forced.scatter_(1, end.long()[:, None], 0.0)
        start = to_device(np.array(budget.start_token_ids, dtype=np.int32), self._device)
        self._rows[row] = _Row(budget.num_tokens, start, end, forced)

    def remove_row(self, row: int) -> None:
        self._rows.pop(row, None)

    def apply(self, logits: Tensor, logit_rows: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        """Exclude all but the end marker's next token for rows with a used-up budget."""
        columns = (logit_rows.entries.tolist(), logit_rows.rows.tolist(), positions.tolist())
        for entry, row, position in zip(*columns, strict=True):
            self._force(logits[entry], self._rows[row], token_ids[row, :position])

    def _force(self, logits: Tensor, budget: _Row, token_ids: Tensor) -> None:
        begun_at = _last_end(token_ids, budget.start)
        num_tokens = len(token_ids) - begun_at
        is_thinking = (begun_at >= 0) & (begun_at > _last_end(token_ids, budget.end))
        is_spent = is_thinking & (num_tokens >= budget.num_tokens)
        # The part of the marker that the row ends with, however far the block exceeds its budget.
        num_matched = _num_begun(token_ids, budget.end, num_tokens)
        forced = budget.forced.index_select(0, num_matched.reshape(1))[0]
        logits.copy_(torch.where(is_spent, forced, logits))


def _num_begun(token_ids: Tensor, marker: Tensor, num_tokens: Tensor) -> Tensor:
    """[] int64: length of the longest prefix of `marker` [M], at most M - 1, ending the last `num_tokens`."""
    num_matched = torch.zeros((), dtype=torch.int64, device=token_ids.device)
    for count in range(1, min(len(marker), len(token_ids) + 1)):
        is_there = (token_ids[-count:] == marker[:count]).all() & (num_tokens >= count)
        num_matched = torch.where(is_there, count, num_matched)
    return num_matched


def _last_end(token_ids: Tensor, marker: Tensor) -> Tensor:
    """The position [] after the last `marker` [M] among `token_ids` [L], -1 if there is none."""
    length = len(marker)
    if len(token_ids) < length:
        return torch.full((), -1, dtype=torch.int64, device=token_ids.device)
    is_marker = (token_ids.unfold(0, length, 1) == marker).all(1)
    ends = torch.arange(length, len(token_ids) + 1, device=token_ids.device)
    return torch.where(is_marker, ends, -1).max()
