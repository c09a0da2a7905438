"""Computes the logprobs of prompt positions in a step, each from the logits of the position before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.core.step import AdmittedRequest, TokenLogprobs
from engine_svc.features.prompt_logprobs.extras import PromptLogprobs, PromptLogprobSpec, PromptRun
from engine_svc.runner.feature import PendingPart, RunnerContext, RunnerFeature
from engine_svc.runner.input_batch import StepInputs
from engine_svc.runner.sampling.logprobs import LogprobSpec, PositionLogprobs, look_up
from engine_svc.runner.sampling.transfer import Ints

# Logits of a long prompt are processed in parts of at most 64 MiB.
_MAX_LOGITS = 1 << 24


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature:
    return PromptLogprobRows(context.vocab_size, context.token_ids)


@dataclass(frozen=True, slots=True)
class _Row:
    spec: LogprobSpec
    num_prompt_tokens: int

    def positions(self, start: int, end: int) -> range | None:
        """The prompt positions whose logprobs come from the logits of positions start to end - 1, or None.

        Position 0 has no logits before it: the range after it is returned even if it is empty.
        """
        positions = range(start + 1, min(end + 1, self.num_prompt_tokens))
        return positions if positions or start == 0 else None


class PromptLogprobRows(RunnerFeature):
    """The rows that want logprobs of their prompts. token_ids: of all rows."""

    def __init__(self, vocab_size: int, token_ids: Tensor) -> None:
        self._vocab_size = vocab_size
        self._token_ids = token_ids
        self._rows: dict[int, _Row] = {}
        self._positions: list[tuple[int, range]] = []  # rows of this step, and their positions

    def uses(self, admitted: AdmittedRequest) -> bool:
        return PromptLogprobSpec in admitted.extras

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        wanted: PromptLogprobSpec = admitted.extras[PromptLogprobSpec]
        spec = LogprobSpec.of(wanted.num_top, wanted.token_ids, self._vocab_size)
        self._rows[row] = _Row(spec, admitted.num_prompt_tokens)

    def remove_row(self, row: int) -> None:
        self._rows.pop(row, None)

    def extra_positions(self, inputs: StepInputs) -> Ints | None:
        self._positions = []
        parts = []
        first_tokens = (inputs.counts.cumsum() - inputs.counts).tolist()
        for index, row in enumerate(inputs.rows.tolist()):
            if row not in self._rows:
                continue
            start = int(inputs.starts[index])
            positions = self._rows[row].positions(start, start + int(inputs.counts[index]))
            if positions is not None:
                self._positions.append((row, positions))
                parts.append(first_tokens[index] + np.arange(len(positions)))
        return np.concatenate(parts) if parts else None

    def before_sampling(self, inputs: StepInputs, logits: Tensor) -> PendingPart:
        computed = []
        sizes = [len(positions) for _, positions in self._positions]
        for (row, positions), own in zip(self._positions, logits.split(sizes), strict=True):
            following = self._token_ids[row, positions.start : positions.stop].long()
            computed.append((row, positions.start, self._look_up(own, following, self._rows[row].spec)))
        return lambda: {
            row: PromptLogprobs((PromptRun(start, _to_columns(parts)),)) for row, start, parts in computed
        }

    def _look_up(self, logits: Tensor, tokens: Tensor, spec: LogprobSpec) -> list[PositionLogprobs]:
        """Logprobs of a prompt's tokens [M], each by the logits [M, V] of the position before it."""
        size = max(1, _MAX_LOGITS // self._vocab_size)
        return [
            look_up(logits[start : start + size].float().log_softmax(-1), tokens[start : start + size], spec)
            for start in range(0, max(1, len(tokens)), size)
        ]


def _to_columns(parts: Sequence[PositionLogprobs]) -> TokenLogprobs:
    columns = parts[0].to_columns(0, len(parts[0].ranks))
    for part in parts[1:]:
        columns.extend(part.to_columns(0, len(part.ranks)))
    return columns
