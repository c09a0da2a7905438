"""Snapshot of a data-parallel group: its engines, and which of them belong to it at a given size.

Knows no operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator_svc.membership.registry import MemberState


@dataclass(frozen=True, slots=True)
class Formed:
    """How far a lockstep group has reached its wanted size."""

    generation: int  # the present one, or the one that is being formed
    size: int  # members of the present generation
    is_settled: bool = False  # no change is in progress or needed
    is_changing_over: bool = False
    num_answered: int = 0  # engines that have answered in the present phase
    num_asked: int = 0  # engines that must answer in it; 0: no phase is in progress
    num_failures: int = 0  # in a row
    last_failure: str = ""


@dataclass(frozen=True, slots=True)
class GroupEngine:
    """One member as an operation sees it."""

    engine_id: str
    engine_epoch: int
    dp_rank: int
    state: MemberState
    num_kv_blocks: int = 0  # 0: not known yet

    @property
    def key(self) -> tuple[str, int]:
        """The process: one that restarts under the same id is another."""
        return (self.engine_id, self.engine_epoch)


@dataclass(frozen=True, slots=True)
class Group:
    """The engines of a group, in order of registration. `formed` is None without lockstep."""

    name: str
    engines: tuple[GroupEngine, ...]
    formed: Formed | None = None

    @property
    def size(self) -> int:
        """How many engines are not draining."""
        return len(self.staying)

    @property
    def staying(self) -> tuple[GroupEngine, ...]:
        """The engines that are not draining."""
        return tuple(engine for engine in self.engines if engine.state is not MemberState.DRAINING)

    @property
    def num_kv_blocks(self) -> int:
        """The least number among READY engines; 0 if there is none."""
        ready = (one.num_kv_blocks for one in self.engines if one.state is MemberState.READY)
        return min((number for number in ready if number), default=0)

    def indexes(self) -> dict[GroupEngine, int]:
        """The index of each engine that is not draining: its rank, or the next free index if ranks repeat.

        Engines that were started one by one may all have rank 0.
        """
        indexes: dict[GroupEngine, int] = {}
        free = 0
        for engine in sorted(self.staying, key=lambda engine: engine.dp_rank):
            indexes[engine] = max(engine.dp_rank, free)
            free = indexes[engine] + 1
        return indexes

    def above(self, size: int) -> list[GroupEngine]:
        """The engines whose index is outside a group of that size."""
        return [engine for engine, index in self.indexes().items() if index >= size]

    def below(self, size: int) -> list[GroupEngine]:
        """The engines whose index is inside a group of that size."""
        return [engine for engine, index in self.indexes().items() if index < size]
