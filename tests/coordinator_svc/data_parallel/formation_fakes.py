"""A formation whose engines answer as a test says, on a clock that a test turns."""

from __future__ import annotations

from coordinator_svc.data_parallel.formation import Formation, Limits, Phase, Prepare
from coordinator_svc.data_parallel.ranks import Rank, RankReport


class Group:
    """A formation with a clock, and engines a, b, c... of ranks 0, 1, 2... whose answers a test gives."""

    def __init__(self, *, size: int = 2, **options: float | int) -> None:
        self.now = 100.0
        self.size = size
        self.formation = Formation(limits=Limits(), **options)  # type: ignore[arg-type]

    def join(self, *engine_ids: str, epoch: int = 1, size: int | None = None) -> None:
        for engine_id in engine_ids:
            rank = ord(engine_id) - ord("a")
            self.formation.join(
                Rank(engine_id, epoch, rank, size or self.size, f"host-{engine_id}", 7000 + rank)
            )
        self.step()

    def load(self, *engine_ids: str) -> None:
        self.report(*engine_ids, is_loaded=True)

    def report(self, *engine_ids: str, **fields: int | bool) -> None:
        for engine_id in engine_ids:
            self.formation.report(engine_id, RankReport(**fields), self.now)  # type: ignore[arg-type]
        self.step()

    def stand(self, generation: int, *engine_ids: str) -> None:
        self.report(*engine_ids, generation=generation)

    def fall_apart(self, *engine_ids: str) -> None:
        self.report(*engine_ids, is_loaded=True)

    def lose(self, engine_id: str) -> None:
        self.formation.lose(engine_id, self.now)
        self.step()

    def end(self, engine_id: str, *, has_ended: bool = True) -> None:
        self.formation.leave(engine_id, self.now, has_ended=has_ended)
        self.step()

    def take(self, *engine_ids: str) -> None:
        """These engines take commands now."""
        for engine_id in engine_ids:
            self.formation.answer(engine_id, self.formation.orders()[engine_id], self.now)
        self.step()

    def refuse(self, engine_id: str, why: str = "no memory") -> None:
        self.formation.answer(engine_id, self.formation.orders()[engine_id], self.now, refusal=why)
        self.step()

    def resize(self, size: int | None, *leaving: str) -> None:
        self.formation.resize(size, leaving)
        self.step()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    def step(self) -> None:
        self.formation.step(self.now)

    def ranks(self) -> dict[str, int | None]:
        orders = self.formation.orders()
        return {id_: order.rank for id_, order in orders.items() if isinstance(order, Prepare)}

    def change_over(self, *members: str, leavers: str = "") -> int:
        """All prepare, commit and report the new generation, which is returned."""
        generation = self.formation.preparing
        self.take(*members, *leavers)
        self.take(*members, *leavers)
        self.stand(generation, *members)
        assert self.formation.phase is Phase.RESTING
        return generation


def formed(*engine_ids: str, **options: float | int) -> Group:
    """A group that has formed its first generation."""
    group = Group(size=len(engine_ids), **options)
    group.join(*engine_ids)
    group.load(*engine_ids)
    group.change_over(*engine_ids)
    return group
