"""Presence, frequency and repetition penalties: a pure function of a row's logits and of its tokens so far.

Only logits of tokens that a row has seen change, so only these are read and written. Nothing is kept of a row
but its wishes: a request continues anywhere as if it had always been there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_svc.runner.sampling.transfer import to_device
from engine_svc.sampling_params import SamplingParams

_Ints = npt.NDArray[np.int64]

# Counts are made for so many rows at a time that they take 64 MiB at most.
_MAX_COUNTS = 1 << 24


@dataclass(frozen=True, slots=True)
class _Penalised:
    """P of a step's rows and what they asked for.

    indices: [P] their entries of the step, on the host.  rows: [P] those of token_ids.
    The other tensors are [P, 1]: offsets of their logits, num_prompt_tokens, amounts in fp32.
    """

    indices: _Ints
    rows: Tensor
    offsets: Tensor
    num_prompt_tokens: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    counts: bool  # whether anybody asked for presence or frequency
    repeats: bool  # whether anybody asked for repetition


class Penalties:
    """The rows that asked for penalties, and what they asked for."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: set[int] = set()
        self._asks = np.zeros(max_num_seqs, dtype=bool)
        # Rows are presence, frequency, repetition.
        self._amounts = np.zeros((3, max_num_seqs), dtype=np.float32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        # Zero between two uses: clearing what was counted is cheaper than clearing all of it.
        self._counts = torch.zeros(0, dtype=torch.int32, device=device)
        # Steps mostly have the rows of the step before.
        self._latest_rows = b""
        self._latest: list[_Penalised] = []

    def enter(self, row: int, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """Note what a row wishes, if anything."""
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
        """Forget a row."""
        if row in self._rows:
            self._rows.remove(row)
            self._asks[row] = False
            self._latest_rows = b""

    def apply(self, logits: Tensor, rows: _Ints, positions: _Ints, token_ids: Tensor) -> None:
        """Change the logits [N, V] of seen tokens, in place. token_ids[rows[n], :positions[n]] were seen."""
        if not self._rows:
            return
        # Rows of like length together: to all of a part, the longest's places are looked at.
        rungs = np.frexp(positions[self._asks[rows]].astype(np.float64))[1]
        key = rows.tobytes() + rungs.tobytes()
        if key != self._latest_rows:
            self._latest_rows, self._latest = key, self._find(rows, rungs)
        for part in self._latest:
            self._apply_to(part, logits.view(-1), positions[part.indices], token_ids)

    def _find(self, rows: _Ints, rungs: npt.NDArray[np.int32]) -> list[_Penalised]:
        """The parts. rungs: of each row that asks, the power of two above its length."""
        indices = self._asks[rows].nonzero()[0]
        parts = []
        for rung in np.unique(rungs).tolist():
            members = indices[rungs == rung]
            size = max(1, _MAX_COUNTS // max(self._vocab_size, 1 << rung))
            parts += [members[start : start + size] for start in range(0, len(members), size)]
        return [self._columns(part, rows[part]) for part in parts]

    def _columns(self, indices: _Ints, rows: _Ints) -> _Penalised:
        amounts = self._amounts[:, rows]
        columns = np.stack([rows, indices * self._vocab_size, self._num_prompt_tokens[rows]])
        on_device, offsets, num_prompt_tokens = to_device(columns, self._device)
        presence, frequency, repetition = to_device(amounts, self._device)[:, :, None]
        return _Penalised(
            indices, on_device, offsets[:, None], num_prompt_tokens[:, None], presence, frequency, repetition,
            counts=bool(amounts[:2].any()), repeats=bool((amounts[2] != 1.0).any()),
        )  # fmt: skip

    def _apply_to(self, part: _Penalised, logits: Tensor, lengths: _Ints, token_ids: Tensor) -> None:
        """logits: [N * V].  lengths: [P] tokens that each row has."""
        longest = int(lengths.max())
        seen = token_ids[:, :longest].index_select(0, part.rows).long()
        index = torch.arange(longest, device=self._device)
        is_known = index < to_device(lengths[:, None], self._device)
        # Behind its last token a row repeats its first: equal ids get equal values, however often written.
        seen = torch.where(is_known, seen, seen[:, :1])
        flat = seen + part.offsets
        values = logits.take(flat)
        if part.repeats:
            values = torch.where(values > 0.0, values / part.repetition, values * part.repetition)
        if part.counts:
            counts = self._count(seen, is_known & (index >= part.num_prompt_tokens))
            values = values - part.frequency * counts
            values = values - part.presence * (counts > 0)
        logits.scatter_(0, flat.flatten(), values.flatten())

    def _count(self, seen: Tensor, is_output: Tensor) -> Tensor:
        """How often the token at each place of `seen` [P, L] stands at places where is_output [P, L]."""
        num_rows = len(seen)
        if len(self._counts) < num_rows * self._vocab_size:
            self._counts = torch.zeros(num_rows * self._vocab_size, dtype=torch.int32, device=self._device)
        offsets = torch.arange(0, num_rows * self._vocab_size, self._vocab_size, device=self._device)
        flat = seen + offsets[:, None]
        self._counts.scatter_add_(0, flat.flatten(), is_output.flatten().int())
        counts = self._counts.take(flat)
        self._counts.index_fill_(0, flat.flatten(), 0)
        return counts
