"""Log probabilities, ranks and most likely alternatives of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import TokenLogprobs
from engine_svc.runner.sampling.transfer import Ints, to_device, to_host


@dataclass(frozen=True, slots=True)
class LogprobSpec:
    """The logprobs of a request per position: of the `num_top` most likely tokens, then of `token_ids`."""

    num_top: int
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, num_top: int, token_ids: Sequence[int], vocab_size: int) -> LogprobSpec:
        """-1 as `num_top` stands for the vocabulary; ids outside of it are left out."""
        known = tuple(token_id for token_id in token_ids if 0 <= token_id < vocab_size)
        return cls(vocab_size if num_top < 0 else min(num_top, vocab_size), known)


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Logprobs of P positions with the same spec. On the host, to be read once the device is done.

    logprobs: [P] fp32 of the positions' own tokens.  ranks: [P] int64, from 1: entries as large or larger.
    top_ids, top_logprobs: [P, k] int64 and fp32, the most likely first, then the requested ids.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def to_columns(self, first: int, end: int) -> TokenLogprobs:
        """The positions from `first` to `end - 1` as plain columns."""
        return TokenLogprobs(
            logprobs=self.logprobs[first:end].tolist(),
            ranks=self.ranks[first:end].tolist(),
            k=self.top_ids.shape[1],
            top_token_ids=self.top_ids[first:end].flatten().tolist(),
            top_logprobs=self.top_logprobs[first:end].flatten().tolist(),
        )


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Logprobs of sampled tokens: for each spec, the entries of the step that have it, in order."""

    parts: list[tuple[list[int], PositionLogprobs]]

    def moved(self, positions: Ints) -> SampledLogprobs:
        """The same, if entry n of this step is entry positions[n] of a larger step."""
        return SampledLogprobs([(positions[indices].tolist(), part) for indices, part in self.parts])

    def by_index(self) -> dict[int, TokenLogprobs]:
        """The logprobs of each entry that requested them. Only once the device is done."""
        return {
            index: positions.to_columns(entry, entry + 1)
            for indices, positions in self.parts
            for entry, index in enumerate(indices)
        }


class LogprobSpecs:
    """The rows that requested logprobs."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._sampled: dict[int, LogprobSpec] = {}

    def enter(self, row: int, sampling: SamplingParams) -> None:
        if sampling.wants_logprobs:
            spec = LogprobSpec.of(sampling.logprobs or 0, sampling.logprob_token_ids, self._vocab_size)
            self._sampled[row] = spec

    def leave(self, row: int) -> None:
        self._sampled.pop(row, None)

    def indices(self, rows: Ints) -> list[int]:
        """The indices n for which rows[n] requested logprobs of its sampled token."""
        if not self._sampled:
            return []
        return [index for index, row in enumerate(rows.tolist()) if row in self._sampled]

    def gather_sampled(
        self, scores: Tensor, tokens: Tensor, indices: list[int], rows: Ints
    ) -> SampledLogprobs:
        """Logprobs of tokens [P] by scores [P, V], which belong to entries `indices` of the step."""
        groups: dict[LogprobSpec, list[int]] = {}
        for entry, index in enumerate(indices):
            groups.setdefault(self._sampled[int(rows[index])], []).append(entry)
        if len(groups) == 1:
            (spec,) = groups
            return SampledLogprobs([(indices, look_up(scores, tokens, spec))])
        parts = []
        for spec, positions in groups.items():
            chosen = to_device(np.array(positions, dtype=np.int64), self._device)
            part = look_up(scores.index_select(0, chosen), tokens.index_select(0, chosen), spec)
            parts.append(([indices[entry] for entry in positions], part))
        return SampledLogprobs(parts)


def look_up(scores: Tensor, tokens: Tensor, spec: LogprobSpec) -> PositionLogprobs:
    """The logprobs of tokens [P] int64 by scores [P, V] fp32: log probabilities or logits."""
    own = scores.gather(1, tokens[:, None])
    ranks = (scores >= own).sum(-1)
    top_logprobs, top_ids = scores.topk(spec.num_top, dim=-1)
    if spec.token_ids:
        requested = to_device(np.array(spec.token_ids, dtype=np.int64), scores.device)
        top_ids = torch.cat([top_ids, requested.expand(len(scores), -1)], dim=1)
        top_logprobs = torch.cat([top_logprobs, scores.index_select(1, requested)], dim=1)
    return PositionLogprobs(to_host(own.squeeze(1)), to_host(ranks), to_host(top_ids), to_host(top_logprobs))
