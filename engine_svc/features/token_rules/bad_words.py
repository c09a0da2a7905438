"""Token sequences that must not be completed. Sequences of one token are plain bans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_svc.runner.feature import LogitRows
from engine_svc.runner.sampling.transfer import Ints, to_device

# Padding of a prefix that is shorter than the longest.
_ANY = -1


@dataclass(frozen=True, slots=True)
class _Words:
    """The W words of a step's rows, prefixes aligned at their ends.

    indices: [W] each word's entry of the step's rows with rules, on the host.  rows: [W] its row of
    token_ids.  prefixes: [W, P] int32.  needed: [W] tokens that the row must have.  flat: [W] logit index of
    its last token.
    """

    indices: Ints
    rows: Tensor
    prefixes: Tensor
    needed: Tensor
    flat: Tensor


class BadWords:
    """The rows that must not complete words of several tokens."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._words: dict[int, list[tuple[int, ...]]] = {}
        self._num_prompt_tokens: dict[int, int] = {}
        self._latest_rows: LogitRows | None = None
        self._latest: _Words | None = None

    def put(self, row: int, words: list[tuple[int, ...]], num_prompt_tokens: int) -> None:
        """Set the words of a row, each of two ids or more."""
        words = [word for word in words if 0 <= word[-1] < self._vocab_size]
        if words:
            self._words[row], self._num_prompt_tokens[row] = words, num_prompt_tokens
            self._latest_rows = None

    def drop(self, row: int) -> None:
        if self._words.pop(row, None) is not None:
            del self._num_prompt_tokens[row]
            self._latest_rows = None

    def apply(self, logits: Tensor, logit_rows: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        """Exclude, in logits [N, V], the last token of each word whose other tokens end the row's output."""
        if not self._words:
            return
        if logit_rows is not self._latest_rows:
            self._latest_rows, self._latest = logit_rows, self._find(logit_rows)
        words = self._latest
        if words is None:
            return
        ends = to_device(positions[words.indices], self._device)[:, None]
        length = words.prefixes.shape[1]
        before = torch.arange(-length, 0, device=self._device)
        latest = token_ids[words.rows[:, None], (ends + before).clamp(min=0)]
        is_met = ((latest == words.prefixes) | (words.prefixes == _ANY)).all(1) & (ends[:, 0] >= words.needed)
        # Added, as two words may have the same last token and only one of them be matched.
        logits.view(-1).index_add_(0, words.flat, torch.where(is_met, float("-inf"), 0.0))

    def _find(self, logit_rows: LogitRows) -> _Words | None:
        words = [
            (index, row, word)
            for index, row in enumerate(logit_rows.rows.tolist())
            for word in self._words.get(row, ())
        ]
        if not words:
            return None
        longest = max(len(word) for _, _, word in words) - 1
        prefixes = np.full((len(words), longest), _ANY, dtype=np.int32)
        for index, (_, _, word) in enumerate(words):
            prefixes[index, longest - len(word) + 1 :] = word[:-1]
        needed = [self._num_prompt_tokens[row] + len(word) - 1 for _, row, word in words]
        entries = logit_rows.entries.tolist()
        flat = [entries[index] * self._vocab_size + word[-1] for index, _, word in words]
        return _Words(
            np.array([index for index, _, _ in words], dtype=np.int64),
            to_device(np.array([row for _, row, _ in words], dtype=np.int64), self._device),
            to_device(prefixes, self._device),
            to_device(np.array(needed, dtype=np.int64), self._device),
            to_device(np.array(flat, dtype=np.int64), self._device),
        )
