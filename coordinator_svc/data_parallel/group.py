"""One lockstep group: its wave and its membership, and the commands that follow. Knows no streams."""

from __future__ import annotations

import logging
from functools import partial

from coordinator_svc.data_parallel.commands import Commands, Kind
from coordinator_svc.data_parallel.formation import Formation
from coordinator_svc.data_parallel.orders import Order
from coordinator_svc.data_parallel.ranks import Rank, RankReport
from coordinator_svc.data_parallel.wave import Start, Wave, WaveStatus
from coordinator_svc.wire.convert import to_membership_command, to_start_command
from service_kit.clock import Clock
from triptych.common.v1 import error_pb2
from triptych.coordinator.v1 import member_pb2

logger = logging.getLogger(__name__)


class LockstepGroup:
    """Takes in what the engines of one group say, and tells them what is due."""

    def __init__(self, name: str, formation: Formation, commands: Commands, clock: Clock) -> None:
        self.name = name
        self.wave = Wave()
        self.formation = formation
        self.parallel_config_hash = ""
        self._commands = commands
        self._clock = clock
        self._engines: dict[str, int] = {}  # the epoch of each
        self._reported: dict[str, tuple[WaveStatus, RankReport]] = {}
        self._sent_orders: dict[str, Order] = {}
        self._logged: tuple[str, int] = ("", 0)

    @property
    def is_empty(self) -> bool:
        """Whether it has no engines."""
        return not self._engines

    def join(self, rank: Rank, wave: int) -> None:
        """An engine has registered, for the first time or again. wave: the newest it knows."""
        engine_id = rank.engine_id
        if self._engines.get(engine_id) != rank.engine_epoch:
            self.leave(engine_id, has_ended=True)
            self._engines[engine_id] = rank.engine_epoch
            self.wave.report(engine_id, WaveStatus(wave, is_running=False, is_apart=True))
        else:
            self.wave.reconnect(engine_id)
        self.formation.join(rank)

    def report(self, engine_id: str, status: WaveStatus, report: RankReport) -> bool:
        """An engine says how it is. False where it has said the same before, as most reports do."""
        if engine_id not in self._engines or self._reported.get(engine_id) == (status, report):
            return False
        self._reported[engine_id] = (status, report)
        self.wave.report(engine_id, status)
        self.formation.report(engine_id, report, self._clock.now())
        return True

    def hint(self, engine_id: str, wave: int) -> None:
        """A frontend has sent a request to an engine while it believed that nothing runs."""
        self.wave.hint(engine_id, wave)

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
        """Tell engines what is due now."""
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
        """When `step` is to be called if nothing happens before; None: only when something happens."""
        # What is due now was done by the step before.
        times = (self.formation.next_at(), self.wave.next_at())
        return min((at for at in times if at is not None and at > self._clock.now()), default=None)

    def state(self) -> member_pb2.WaveState:
        """What frontends are told of the group."""
        return member_pb2.WaveState(
            dp_group=self.name,
            wave=self.wave.number,
            engines_running=self.wave.is_running,
            generation=self.formation.generation,
        )

    def status(self) -> dict[str, str | int | float]:
        """Facts for operators."""
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
        why = None if refusal is None else refusal.message
        self.formation.answer(engine_id, order, self._clock.now(), refusal=why)

    def _take_start(self, start: Start, engine_id: str, refusal: error_pb2.ErrorStatus | None) -> None:
        self.wave.answer(engine_id, start.wave, is_taken=refusal is None)

    def _log(self) -> None:
        formation = self.formation
        logged = (formation.phase.value, formation.preparing or formation.generation)
        if logged != self._logged:
            self._logged = logged
            fields = {"dp_group": self.name, "phase": logged[0], "generation": logged[1]}
            logger.info("membership of group", extra={**fields, "failure": formation.last_failure})
