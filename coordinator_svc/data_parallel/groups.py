"""The lockstep groups by name, and which of them changed. Knows no streams and no rule of a group."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from coordinator_svc.data_parallel.commands import Commands
from coordinator_svc.data_parallel.formation import Formation
from coordinator_svc.data_parallel.group import LockstepGroup
from coordinator_svc.wire.convert import to_rank, to_rank_report, to_wave_status
from coordinator_svc.wire.number_limits import check_ahead
from service_kit.clock import Clock
from service_kit.errors import ResourceExhausted
from triptych.coordinator.v1 import coordinator_pb2, member_pb2

MAX_GROUPS = 1024


class Groups:
    """Engines that step together, in groups. Engines that stand alone, or never wait for others, are in none.

    A group that has lost all its engines is kept, as its wave number must not fall, while there is room.
    first_generation, settled_at: see `Formation`.
    """

    def __init__(
        self, commands: Commands, clock: Clock, *, first_generation: int = 1, settled_at: float = 0.0
    ) -> None:
        self.version = 0  # grows with every change of what frontends are told
        self._commands = commands
        self._clock = clock
        self._first_generation = first_generation
        self._settled_at = settled_at
        self._groups: dict[str, LockstepGroup] = {}
        self._group_of: dict[str, LockstepGroup] = {}  # by engine id
        self._states: dict[str, tuple[int, member_pb2.WaveState]] = {}  # with the version of the last change

    def find(self, name: str) -> LockstepGroup | None:
        """The group of that name, or None."""
        return self._groups.get(name)

    def formations(self) -> Mapping[str, Formation]:
        """The membership of each group by name."""
        return {name: group.formation for name, group in self._groups.items()}

    def resize(self, name: str, size: int | None, leaving: Collection[str]) -> None:
        """Want so many members of a group; see `Formation.resize`. What is wanted of no group is nothing."""
        group = self._groups.get(name)
        if group is not None:
            group.formation.resize(size, leaving)
            self.step(group)

    def check_room(self, name: str) -> None:
        """Raise ResourceExhausted if there can be no group of that name beside those there are."""
        if (
            name not in self._groups
            and sum(not group.is_empty for group in self._groups.values()) >= MAX_GROUPS
        ):
            raise ResourceExhausted(f"{MAX_GROUPS} lockstep groups are there, which is the limit")

    def check_ahead(self, name: str, kind: str, *, wave: int, generation: int = 0) -> None:
        """Raise InvalidArgument for numbers in a message of that kind that would push the group too far."""
        group = self._groups.get(name)
        check_ahead(f"{kind}.wave", wave, group.wave.number if group else 0)
        check_ahead(f"{kind}.generation", generation, group.formation.newest if group else 0)

    def join(self, message: member_pb2.EngineRegistration) -> None:
        """Enter an engine of a lockstep group, for the first time or again."""
        group = self._groups.get(message.dp_group) or self._add(message.dp_group)
        before = self._group_of.get(message.engine_id)
        if before is not None and before is not group:
            before.leave(message.engine_id, has_ended=True)
            self.step(before)
        self._group_of[message.engine_id] = group
        group.parallel_config_hash = message.parallel_config_hash or group.parallel_config_hash
        group.join(to_rank(message), message.wave)
        self.step(group)

    def report(self, engine_id: str, report: coordinator_pb2.EngineReport) -> None:
        """Take in what an engine says, if it belongs to a group."""
        group = self._group_of.get(engine_id)
        if group is not None and group.report(engine_id, to_wave_status(report), to_rank_report(report)):
            self.step(group)

    def lose(self, engine_id: str) -> None:
        """The session of an engine is gone."""
        group = self._group_of.get(engine_id)
        if group is not None:
            group.lose(engine_id)
            self.step(group)

    def leave(self, engine_id: str, *, has_ended: bool) -> None:
        """An engine is no member any more. has_ended: its process is known to have ended."""
        group = self._group_of.pop(engine_id, None)
        if group is not None:
            group.leave(engine_id, has_ended=has_ended)
            self.step(group)

    def hint(self, hint: coordinator_pb2.FirstRequestWhilePaused) -> bool:
        """A frontend has sent a request to a group that it believes to be paused. False: no such group."""
        group = self._groups.get(hint.dp_group)
        if group is None or self._group_of.get(hint.engine_id) is not group:
            return False
        group.hint(hint.engine_id, hint.wave)
        self.step(group)
        return True

    def answered(self, engine_id: str) -> None:
        """An engine has answered a command."""
        group = self._group_of.get(engine_id)
        if group is not None:
            self.step(group)

    def step_all(self) -> None:
        """Let every group do what is due."""
        for group in self._groups.values():
            self.step(group)

    def step(self, group: LockstepGroup) -> None:
        """Let one group do what is due, and note what frontends have to be told of it."""
        group.step()
        state = group.state()
        if group.name not in self._states or self._states[group.name][1] != state:
            self.version += 1
            self._states[group.name] = (self.version, state)

    def next_at(self) -> float | None:
        """When `step_all` is to be called if nothing happens before; None: only when something happens."""
        times = (group.next_at() for group in self._groups.values())
        return min((at for at in times if at is not None), default=None)

    def states(self, *, since: int = -1) -> list[member_pb2.WaveState]:
        """What frontends are told of each group that changed after the version `since`."""
        return [state for version, state in self._states.values() if version > since]

    def status(self) -> dict[str, str | int | float]:
        """Facts of each group for operators."""
        return {
            f"group.{group.name or 'unnamed'}.{key}": value
            for group in self._groups.values()
            if not group.is_empty
            for key, value in group.status().items()
        }

    def _add(self, name: str) -> LockstepGroup:
        if len(self._groups) >= MAX_GROUPS:
            oldest = next(name for name, group in self._groups.items() if group.is_empty)
            del self._groups[oldest], self._states[oldest]
        formation = Formation(first_generation=self._first_generation, settled_at=self._settled_at)
        group = LockstepGroup(name, formation, self._commands, self._clock)
        self._groups[name] = group
        return group
