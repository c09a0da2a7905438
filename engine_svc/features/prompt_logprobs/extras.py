"""The logprobs that a request asks for per prompt position, and those that steps computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from engine_svc.core.extras import Extra, OutputExtra
from engine_svc.core.step import TokenLogprobs

# Upper limits on the wire, of a run of positions and of one logprob with its token id or rank.
_RUN_BYTES = 64
_ENTRY_BYTES = 8


@dataclass(frozen=True, slots=True)
class PromptLogprobSpec(Extra):
    """The tokens of each position to report: the `num_top` most likely, -1 for all, then `token_ids`."""

    num_top: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Logprobs of consecutive positions. The first is at least 1: position 0 has no logprob."""

    first_position: int
    token_logprobs: TokenLogprobs

    @property
    def end_position(self) -> int:
        return self.first_position + len(self.token_logprobs.ranks)

    @property
    def size_bytes(self) -> int:
        # One position more: the wire adds the first of a prompt, which has no logprob.
        num_entries = (1 + len(self.token_logprobs.ranks)) * (1 + self.token_logprobs.k)
        return _RUN_BYTES + num_entries * _ENTRY_BYTES

    def split(self, max_bytes: int) -> Iterator[PromptRun]:
        columns = self.token_logprobs
        # One position less, for the one that `size_bytes` adds.
        max_positions = max(1, (max_bytes - _RUN_BYTES) // ((1 + columns.k) * _ENTRY_BYTES) - 1)
        for first in range(0, max(1, len(columns.ranks)), max_positions):
            yield PromptRun(self.first_position + first, columns.part(first, first + max_positions))


@dataclass(frozen=True, slots=True)
class PromptLogprobs(OutputExtra):
    """Logprobs of a prompt's positions that steps computed, in runs."""

    runs: tuple[PromptRun, ...]
    # Otherwise how much a client gets would depend on how the prompt was divided.
    stays_with_error: ClassVar[bool] = True

    @property
    def size_bytes(self) -> int:
        return sum(run.size_bytes for run in self.runs)

    def merged(self, later: PromptLogprobs) -> PromptLogprobs:
        return PromptLogprobs(self.runs + later.runs)

    def split(self, max_bytes: int) -> list[PromptLogprobs]:
        groups: list[list[PromptRun]] = [[]]
        num_bytes = 0
        for run in self.runs:
            for part in run.split(max_bytes):
                if groups[-1] and num_bytes + part.size_bytes > max_bytes:
                    groups.append([])
                    num_bytes = 0
                groups[-1].append(part)
                num_bytes += part.size_bytes
        return [PromptLogprobs(tuple(group)) for group in groups]


EXTRAS = (PromptLogprobSpec, PromptLogprobs)
