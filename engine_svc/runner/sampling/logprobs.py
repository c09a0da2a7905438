"""Log probabilities, ranks and most likely alternatives of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import TokenLogprobs
from engine_svc.runner.sampling.transfer import Ints, to_device, to_host

# Logits of a long prompt are processed in parts of at most 64 MiB.
_MAX_LOGITS = 1 << 24


@dataclass(frozen=True, slots=True)
class LogprobSpec:
    """Which logprobs a request wants per position: `num_top` most likely tokens, then `token_ids`."""

    num_top: int
    token_ids: tuple[int, ...] = ()


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


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of consecutive prompt positions. On the host, to be read once the device is done."""

    parts: list[PositionLogprobs]

    def to_columns(self) -> TokenLogprobs:
        token_logprobs = self.parts[0].to_columns(0, len(self.parts[0].ranks))
        for part in self.parts[1:]:
            token_logprobs.extend(part.to_columns(0, len(part.ranks)))
        return token_logprobs


class LogprobSpecs:
    """The rows that requested logprobs."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._sampled: dict[int, LogprobSpec] = {}
        self._prompt: dict[int, LogprobSpec] = {}
        self._num_prompt_tokens: dict[int, int] = {}  # of rows in _prompt

    def enter(self, row: int, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        token_ids = tuple(id_ for id_ in sampling.logprob_token_ids if 0 <= id_ < self._vocab_size)
        if sampling.wants_logprobs:
            self._sampled[row] = LogprobSpec(self._num_top(sampling.logprobs or 0), token_ids)
        if sampling.prompt_logprobs is not None:
            self._prompt[row] = LogprobSpec(self._num_top(sampling.prompt_logprobs), token_ids)
            self._num_prompt_tokens[row] = num_prompt_tokens

    def leave(self, row: int) -> None:
        self._sampled.pop(row, None)
        if self._prompt.pop(row, None) is not None:
            del self._num_prompt_tokens[row]

    def indices(self, rows: Ints) -> list[int]:
        """The indices n for which rows[n] requested logprobs of its sampled token."""
        if not self._sampled:
            return []
        return [index for index, row in enumerate(rows.tolist()) if row in self._sampled]

    @property
    def any_wants_prompt(self) -> bool:
        return bool(self._prompt)

    def prompt_positions(self, row: int, start: int, end: int) -> range | None:
        """The prompt positions whose logprobs come from the logits of positions start to end - 1, or None.

        Position 0 has no logits before it: the range after it is returned even if it is empty.
        """
        num_prompt_tokens = self._num_prompt_tokens.get(row, 0)
        positions = range(start + 1, min(end + 1, num_prompt_tokens))
        return positions if positions or start == 0 < num_prompt_tokens else None

    def gather_sampled(
        self, scores: Tensor, tokens: Tensor, indices: list[int], rows: Ints
    ) -> SampledLogprobs:
        """Logprobs of tokens [P] by scores [P, V], which belong to entries `indices` of the step."""
        groups: dict[LogprobSpec, list[int]] = {}
        for entry, index in enumerate(indices):
            groups.setdefault(self._sampled[int(rows[index])], []).append(entry)
        if len(groups) == 1:
            (spec,) = groups
            return SampledLogprobs([(indices, _look(scores, tokens, spec))])
        parts = []
        for spec, positions in groups.items():
            chosen = to_device(np.array(positions, dtype=np.int64), self._device)
            part = _look(scores.index_select(0, chosen), tokens.index_select(0, chosen), spec)
            parts.append(([indices[entry] for entry in positions], part))
        return SampledLogprobs(parts)

    def gather_prompt(self, logits: Tensor, tokens: Tensor, row: int) -> PromptLogprobs:
        """Logprobs of a prompt's tokens [M], each by the logits [M, V] of the position before it."""
        size = max(1, _MAX_LOGITS // self._vocab_size)
        parts = [
            _look(logits[start : start + size].float().log_softmax(-1), tokens[start : start + size], spec)
            for spec in (self._prompt[row],)
            for start in range(0, max(1, len(tokens)), size)
        ]
        return PromptLogprobs(parts)

    def _num_top(self, wanted: int) -> int:
        return self._vocab_size if wanted < 0 else min(wanted, self._vocab_size)


def _look(scores: Tensor, tokens: Tensor, spec: LogprobSpec) -> PositionLogprobs:
    """scores: [P, V] fp32, log probabilities or logits.  tokens: [P] int64."""
    own = scores.gather(1, tokens[:, None])
    ranks = (scores >= own).sum(-1)
    top_logprobs, top_ids = scores.topk(spec.num_top, dim=-1)
    if spec.token_ids:
        asked = to_device(np.array(spec.token_ids, dtype=np.int64), scores.device)
        top_ids = torch.cat([top_ids, asked.expand(len(scores), -1)], dim=1)
        top_logprobs = torch.cat([top_logprobs, scores.index_select(1, asked)], dim=1)
    return PositionLogprobs(to_host(own.squeeze(1)), to_host(ranks), to_host(top_ids), to_host(top_logprobs))
