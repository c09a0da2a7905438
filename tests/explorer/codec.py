"""A world as a tuple that can be hashed, and back. Copies the real machines field by field."""

from __future__ import annotations

from dataclasses import fields, replace

from coordinator_svc.data_parallel.wave import START_RETRY_S, Wave
from engine_svc.data_parallel.wave import WaveMachine
from tests.explorer.world import Frozen, Rank, World

_RANK_FIELDS = tuple(each.name for each in fields(Rank) if each.name != "machine")
_WORLD_FIELDS = tuple(
    each.name for each in fields(World) if each.name not in ("ranks", "wave", "generations")
)


class Codec:
    """Freezes and thaws worlds of one kind of machines. Equal parts of worlds are kept once."""

    def __init__(self, machine: type[WaveMachine], wave: type[Wave], *, interval: int) -> None:
        self._machine = machine
        self._wave = wave
        self._machine_fields = tuple(vars(machine(interval=interval)))
        self._wave_fields = tuple(vars(wave()))
        self._kept: dict[Frozen, Frozen] = {}

    def freeze(self, world: World) -> Frozen:
        _count_from_zero(world)
        ranks = tuple(self._keep(_freeze_rank(rank)) for rank in world.ranks)
        wave = None if world.wave is None else self._keep(_freeze_wave(world.wave))
        others = (tuple(world.generations.items()), *[getattr(world, name) for name in _WORLD_FIELDS])
        return (ranks, wave, self._keep(others))

    def thaw(self, frozen: Frozen) -> World:
        """Such a world again, which has no other reference."""
        ranks, wave, others = frozen
        world = World.__new__(World)
        world.ranks = [self._thaw_rank(rank) for rank in ranks]  # type: ignore[attr-defined]
        world.wave = None if wave is None else self._thaw_wave(wave)  # type: ignore[arg-type]
        world.generations = dict(others[0])  # type: ignore[index]
        for name, value in zip(_WORLD_FIELDS, others[1:], strict=True):  # type: ignore[index]
            setattr(world, name, value)
        return world

    def _keep(self, part: Frozen) -> Frozen:
        return self._kept.setdefault(part, part)

    def _thaw_rank(self, frozen: Frozen) -> Rank:
        rank = Rank.__new__(Rank)
        for name, value in zip(_RANK_FIELDS, frozen[1:], strict=True):
            setattr(rank, name, value)
        rank.machine = None
        values = frozen[0]
        if isinstance(values, tuple):
            rank.machine = self._machine.__new__(self._machine)
            vars(rank.machine).update(zip(self._machine_fields, values, strict=True))
        return rank

    def _thaw_wave(self, frozen: Frozen) -> Wave:
        wave = self._wave.__new__(self._wave)
        for name, value in zip(self._wave_fields, frozen, strict=True):
            # A mapping was frozen as its items behind a mark.
            is_mapping = isinstance(value, tuple) and value[:1] == (dict,)
            vars(wave)[name] = dict(value[1:]) if is_mapping else value  # type: ignore[index]
        return wave


def _count_from_zero(world: World) -> None:
    """Only what ranks have launched more than others can ever matter."""
    least = min(rank.num_launched for rank in world.ranks)
    for rank in world.ranks:
        rank.num_launched -= least


def _freeze_rank(rank: Rank) -> Frozen:
    machine = None if rank.machine is None else tuple(vars(rank.machine).values())
    return (machine, *[getattr(rank, name) for name in _RANK_FIELDS])


def _freeze_wave(wave: Wave) -> Frozen:
    return tuple(
        (dict, *sorted(value.items())) if isinstance(value, dict) else value for value in vars(wave).values()
    )


def forget_time(wave: Wave) -> None:
    """Let every message be as old as if it had just been sent: time is no part of a world."""
    sent = vars(wave)["_sent_starts"]
    for engine_id, each in sent.items():
        if each.again_at != float("inf"):
            sent[engine_id] = replace(each, again_at=START_RETRY_S)
