"""Lockstep groups by name: membership and wave of each, and the commands that follow. Knows no streams."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial

from coordinator_svc.data_parallel.commands import Commands, Kind
from coordinator_svc.data_parallel.formation import Formation, Order
from coordinator_svc.data_parallel.ranks import Rank, RankReport
from coordinator_svc.data_parallel.wave import Start, Wave, WaveStatus
from coordinator_svc.wire.convert import (
    to_membership_command,
    to_rank,
    to_rank_report,
    to_start_command,
    to_wave_status,
)
from coordinator_svc.wire.number_limits import check_ahead
from triptych.common.v1 import error_pb2
from triptych.coordinator.v1 import coordinator_pb2, member_pb2
from triptych_kit.clock import Clock
from triptych_kit.errors import ResourceExhausted

logger = logging.getLogger(__name__)

MAX_GROUPS = 1024


class LockstepGroups:
    """All groups of engines that step together. Independent engines are in none.

    A group that has lost all its engines is kept while there is room, as its wave number must not decrease.
    first_generation, settled_at: see `Formation`.
    """

    def __init__(
        self, commands: Commands, clock: Clock, *, first_generation: int = 1, settled_at: float = 0.0
    ) -> None:
        self.version = 0  # grows with every change of a published `WaveState`
        self._commands = commands
        self._clock = clock
        self._first_generation = first_generation
        self._settled_at = settled_at
        self._groups: dict[str, LockstepGroup] = {}
        self._group_of: dict[str, LockstepGroup] = {}  # by engine id
        self._states: dict[str, tuple[int, member_pb2.WaveState]] = {}  # with the version of its last change

    def find(self, name: str) -> LockstepGroup | None:
        return self._groups.get(name)

    def present(self) -> list[LockstepGroup]:
        """The groups that have engines."""
        return [group for group in self._groups.values() if not group.is_empty]

    def formations(self) -> Mapping[str, Formation]:
        return {name: group.formation for name, group in self._groups.items()}

    def resize(self, name: str, size: int | None, leaving: Collection[str]) -> None:
        """Set the wanted size of a group; see `Formation.resize`. No effect if there is no such group."""
        group = self._groups.get(name)
        if group is not None:
            group.formation.resize(size, leaving)
            self.step(group)

    def check_room(self, name: str) -> None:
        """Raise ResourceExhausted if a group of that name would exceed the limit."""
        if (
            name not in self._groups
            and sum(not group.is_empty for group in self._groups.values()) >= MAX_GROUPS
        ):
            raise ResourceExhausted(f"there are {MAX_GROUPS} lockstep groups, which is the limit")

    def check_ahead(self, name: str, kind: str, *, wave: int, generation: int = 0) -> None:
        """Raise InvalidArgument if a number in a message of that kind is too far ahead of the group."""
        group = self._groups.get(name)
        check_ahead(f"{kind}.wave", wave, group.wave.number if group else 0)
        check_ahead(f"{kind}.generation", generation, group.formation.newest if group else 0)

    def join(self, message: member_pb2.EngineRegistration) -> None:
        """Add an engine to its lockstep group, for the first time or again."""
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
        """Apply the report of an engine that belongs to a group."""
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
        """A frontend has sent a request to a group that it assumes to be paused. False: no such group."""
        group = self._groups.get(hint.dp_group)
        if group is None or self._group_of.get(hint.engine_id) is not group:
            return False
        group.wave.hint(hint.engine_id, hint.wave)
        self.step(group)
        return True

    def answered(self, engine_id: str) -> None:
        group = self._group_of.get(engine_id)
        if group is not None:
            self.step(group)

    def step_all(self) -> None:
        for group in self._groups.values():
            self.step(group)

    def step(self, group: LockstepGroup) -> None:
        """Step one group, and update its published state."""
        group.step()
        state = group.state()
        if group.name not in self._states or self._states[group.name][1] != state:
            self.version += 1
            self._states[group.name] = (self.version, state)

    def next_at(self) -> float | None:
        """When to call `step_all` if there is no event before; None: only after an event."""
        times = (group.next_at() for group in self._groups.values())
        return min((at for at in times if at is not None), default=None)

    def states(self, *, since: int = -1) -> list[member_pb2.WaveState]:
        """The published state of each group that has changed after the version `since`."""
        return [state for version, state in self._states.values() if version > since]

    def status(self) -> dict[str, str | int | float]:
        return {
            f"group.{group.name or 'unnamed'}.{key}": value
            for group in self.present()
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


class LockstepGroup:
    """Wave and membership of one group: applies its engines' reports and queues the commands that are due."""

    def __init__(self, name: str, formation: Formation, commands: Commands, clock: Clock) -> None:
        self.name = name
        self.wave = Wave()
        self.formation = formation
        self.parallel_config_hash = ""
        self._commands = commands
        self._clock = clock
        self._engines: dict[str, int] = {}  # engine epoch by id
        self._reported: dict[str, tuple[WaveStatus, RankReport]] = {}
        self._sent_orders: dict[str, Order] = {}
        self._logged: tuple[str, int] = ("", 0)

    @property
    def is_empty(self) -> bool:
        return not self._engines

    def join(self, rank: Rank, wave: int) -> None:
        """An engine has registered, for the first time or again. wave: the newest one it knows."""
        engine_id = rank.engine_id
        if self._engines.get(engine_id) != rank.engine_epoch:
            self.leave(engine_id, has_ended=True)
            self._engines[engine_id] = rank.engine_epoch
            self.wave.report(engine_id, WaveStatus(wave, is_running=False, is_apart=True))
        else:
            self.wave.reconnect(engine_id)
        self.formation.join(rank)

    def report(self, engine_id: str, status: WaveStatus, report: RankReport) -> bool:
        """Apply an engine's report. False if it equals the one before, as most reports do."""
        if engine_id not in self._engines or self._reported.get(engine_id) == (status, report):
            return False
        self._reported[engine_id] = (status, report)
        self.wave.report(engine_id, status)
        self.formation.report(engine_id, report, self._clock.now())
        return True

    def lose(self, engine_id: str) -> None:
        """The session of an engine is gone."""
        self.formation.lose(engine_id, self._clock.now())

    def leave(self, engine_id: str, *, has_ended: bool) -> None:
        """An engine is no member any more. has_ended: its process is known to have ended."""
        self._engines.pop(engine_id, None)
        self._reported.pop(engine_id, None)
        self._sent_orders.pop(engine_id, None)
        self.wave.leave(engine_id)
        self.formation.leave(engine_id, self._clock.now(), has_ended=has_ended)

    def step(self) -> None:
        """Queue the commands that are due now."""
        now = self._clock.now()
        self.formation.step(now)
        self._log()
        orders = self.formation.orders()
        for engine_id in self._sent_orders.keys() - orders.keys():
            del self._sent_orders[engine_id]
            self._commands.drop(engine_id, Kind.MEMBERSHIP)
        for engine_id, order in orders.items():
            if self._sent_orders.get(engine_id) != order:
                self._sent_orders[engine_id] = order
                command = to_membership_command(order, self.parallel_config_hash)
                self._commands.put(engine_id, command, partial(self._take_answer, order))
        for start in self.wave.due(now):
            self._commands.put(start.engine_id, to_start_command(start), partial(self._take_start, start))

    def next_at(self) -> float | None:
        """When to call `step` if there is no event before; None: only after an event."""
        # The last step did what is due now.
        times = (self.formation.next_at(), self.wave.next_at())
        return min((at for at in times if at is not None and at > self._clock.now()), default=None)

    def state(self) -> member_pb2.WaveState:
        """The group's state as frontends get it."""
        return member_pb2.WaveState(
            dp_group=self.name,
            wave=self.wave.number,
            engines_running=self.wave.is_running,
            generation=self.formation.generation,
        )

    def status(self) -> dict[str, str | int | float]:
        formation = self.formation
        return {
            "wave": self.wave.number,
            "running": int(self.wave.is_running),
            "generation": formation.generation,
            "size": len(formation.members),
            "target_size": formation.target_size,
            "phase": formation.phase.value,
            "failure": formation.last_failure,
        }

    def _take_answer(self, order: Order, engine_id: str, refusal: error_pb2.ErrorStatus | None) -> None:
        if self._sent_orders.get(engine_id) == order:
            del self._sent_orders[engine_id]
        reason = None if refusal is None else refusal.message
        self.formation.answer(engine_id, order, self._clock.now(), refusal=reason)

    def _take_start(self, start: Start, engine_id: str, refusal: error_pb2.ErrorStatus | None) -> None:
        self.wave.answer(engine_id, start.wave, is_taken=refusal is None)

    def _log(self) -> None:
        formation = self.formation
        logged = (formation.phase.value, formation.preparing or formation.generation)
        if logged != self._logged:
            self._logged = logged
            fields = {"dp_group": self.name, "phase": logged[0], "generation": logged[1]}
            logger.info("membership of group", extra={**fields, "failure": formation.last_failure})
