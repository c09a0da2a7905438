"""Who is in a data-parallel group, and who has a place in it at which size. Knows no operations."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator_svc.membership.registry import MemberState


@dataclass(frozen=True, slots=True)
class Formed:
    """How far the ranks of a lockstep group are with the size that is wanted of them."""

    generation: int  # that they are in or change over to
    size: int  # how many are in the one that stands
    is_settled: bool = False  # nothing is being changed, and nothing is to be
    is_changing_over: bool = False
    num_answered: int = 0  # who has answered what is being asked
    num_asked: int = 0  # 0: nothing is being asked
    num_failures: int = 0  # in a row
    last_failure: str = ""


@dataclass(frozen=True, slots=True)
class GroupEngine:
    """One member as an operation sees it."""

    engine_id: str
    engine_epoch: int
    dp_rank: int
    state: MemberState
    num_kv_blocks: int = 0  # 0: not told yet

    @property
    def key(self) -> tuple[str, int]:
        """The process: one that restarts under the same id is another."""
        return (self.engine_id, self.engine_epoch)


@dataclass(frozen=True, slots=True)
class Group:
    """Who is in a group now, in order of registration. `formed` is None where ranks do not step together."""

    name: str
    engines: tuple[GroupEngine, ...]
    formed: Formed | None = None

    @property
    def size(self) -> int:
        """How many engines it has that are not on their way out."""
        return len(self.staying)

    @property
    def staying(self) -> tuple[GroupEngine, ...]:
        """The engines that are not on their way out."""
        return tuple(engine for engine in self.engines if engine.state is not MemberState.DRAINING)

    @property
    def num_kv_blocks(self) -> int:
        """What each READY engine has at least; 0 where there is none."""
        ready = (one.num_kv_blocks for one in self.engines if one.state is MemberState.READY)
        return min((number for number in ready if number), default=0)

    def indexes(self) -> dict[GroupEngine, int]:
        """Each engine that stays with its place: its rank, or the next free one where ranks repeat.

        Engines that were started one by one may all say rank 0.
        """
        indexes: dict[GroupEngine, int] = {}
        free = 0
        for engine in sorted(self.staying, key=lambda engine: engine.dp_rank):
            indexes[engine] = max(engine.dp_rank, free)
            free = indexes[engine] + 1
        return indexes

    def above(self, size: int) -> list[GroupEngine]:
        """The engines that a group of that size has no place for."""
        return [engine for engine, index in self.indexes().items() if index >= size]

    def below(self, size: int) -> list[GroupEngine]:
        """The engines that have their places in a group of that size."""
        return [engine for engine, index in self.indexes().items() if index < size]
