"""What a request asks for of its forwards, and what steps computed of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from engine_svc.core.extras import Extra, OutputExtra

ITEM_BYTES = 4  # hidden states are fp32, experts int32
# An upper limit on the wire of a run without its content.
_RUN_BYTES = 160


@dataclass(frozen=True, slots=True)
class ForwardOutputSpec(Extra):
    hidden_states: bool
    routed_experts: bool


@dataclass(frozen=True, slots=True)
class PositionRun:
    """Consecutive positions of a request, from the prompt's first. Content is little-endian, row-major.

    hidden_states: [num_positions, hidden] fp32.  routed_experts: [num_positions, num_layers, k] int32. Each
    is empty where it was not asked for.
    """

    first_position: int
    num_positions: int
    hidden_states: bytes = b""
    routed_experts: bytes = b""
    num_layers: int = 0

    @property
    def end_position(self) -> int:
        return self.first_position + self.num_positions

    @property
    def size_bytes(self) -> int:
        return _RUN_BYTES + len(self.hidden_states) + len(self.routed_experts)

    def part(self, first: int, end: int) -> PositionRun:
        """The entries `first` to `end` - 1."""
        hidden, experts = (
            len(content) // max(1, self.num_positions)
            for content in (self.hidden_states, self.routed_experts)
        )
        return replace(
            self,
            first_position=self.first_position + first,
            num_positions=end - first,
            hidden_states=self.hidden_states[first * hidden : end * hidden],
            routed_experts=self.routed_experts[first * experts : end * experts],
        )

    def split(self, max_bytes: int) -> Iterator[PositionRun]:
        num_bytes = (self.size_bytes - _RUN_BYTES) // max(1, self.num_positions)
        count = max(1, (max_bytes - _RUN_BYTES) // max(1, num_bytes))
        for first in range(0, self.num_positions, count):
            yield self.part(first, min(first + count, self.num_positions))


@dataclass(frozen=True, slots=True)
class ForwardOutputs(OutputExtra):
    """Positions that steps computed, in runs."""

    runs: tuple[PositionRun, ...]
    # Otherwise how much a client gets would depend on how the prompt was divided.
    stays_with_error: ClassVar[bool] = True

    @property
    def size_bytes(self) -> int:
        return sum(run.size_bytes for run in self.runs)

    def merged(self, later: ForwardOutputs) -> ForwardOutputs:
        return ForwardOutputs(self.runs + later.runs)

    def split(self, max_bytes: int) -> list[ForwardOutputs]:
        return [ForwardOutputs((part,)) for run in self.runs for part in run.split(max_bytes)]


EXTRAS = (ForwardOutputSpec, ForwardOutputs)
