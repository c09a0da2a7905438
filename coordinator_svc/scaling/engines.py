"""The registry and topology as scaling needs them: snapshots of groups, and commands to single engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from coordinator_svc.data_parallel.formation import Formation, Phase
from coordinator_svc.membership.registry import EngineRegistry, Member
from coordinator_svc.membership.topology import Topology
from coordinator_svc.scaling.group_snapshot import Formed, Group, GroupEngine
from triptych.common.v1 import error_pb2
from triptych.coordinator.v1 import command_pb2
from triptych_kit.errors import DeadlineExceeded, Unavailable

_ANSWER_S = 5.0


class MemberEngines:
    """Implements `Engines` of the scaling service on the registry and the topology."""

    def __init__(self, registry: EngineRegistry, topology: Topology) -> None:
        self._registry = registry
        self._topology = topology
        self._waiting: dict[str, set[asyncio.Future[str]]] = {}  # callers of `drain` by engine id

    def find(self, engine_id: str) -> GroupEngine | None:
        member = self._registry.find(engine_id)
        return None if member is None else _engine(member)

    def groups(self) -> Mapping[str, Group]:
        """Every group that has a member. An independent engine is not a rank of a lockstep group."""
        members = self._registry.members()
        lockstep = {one.registration.dp_group for one in members if one.registration.is_lockstep}
        engines: dict[str, list[GroupEngine]] = {}
        for member in members:
            name = member.registration.dp_group
            if member.registration.is_lockstep or name not in lockstep:
                engines.setdefault(name, []).append(_engine(member))
        formations = self._topology.groups.formations()
        formed = {name: _formed(formations[name]) for name in lockstep & formations.keys()}
        return {name: Group(name, tuple(ranks), formed.get(name)) for name, ranks in engines.items()}

    def want_members(self, group: str, size: int, leaving: frozenset[str]) -> None:
        """Set the wanted size of a lockstep group, and the engines that must leave it."""
        self._topology.groups.resize(group, size, leaving)

    def num_in_flight(self, engine_id: str) -> int:
        """How many requests the engine has, by its newest report."""
        return self._topology.num_in_flight(engine_id)

    def evict(self, engine_id: str, reason: str) -> int:
        """Remove an engine; its process cannot register again. Returns the topology version without it."""
        return self._topology.evict_engine(engine_id, reason)

    async def drain(self, engine_id: str, deadline_s: float) -> str:
        """Command an engine to drain; returns why it refuses, or "". The last deadline sent applies.

        Raises Unavailable at once if it has no session, DeadlineExceeded if it does not answer.
        """
        if not self._topology.commands.has_session(engine_id):
            raise Unavailable(f"engine {engine_id} has no session: it cannot be drained")
        answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(engine_id, set())
        waiting.add(answered)
        drain = command_pb2.DrainCommand(deadline_ms=round(deadline_s * 1000))
        self._topology.commands.put(engine_id, command_pb2.Command(drain=drain), self._take_answer)
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await answered
        except TimeoutError as error:
            raise DeadlineExceeded(f"engine {engine_id} has not answered within {_ANSWER_S:g} s") from error
        finally:
            waiting.discard(answered)
            if not waiting:
                self._waiting.pop(engine_id, None)

    def _take_answer(self, engine_id: str, refusal: error_pb2.ErrorStatus | None) -> None:
        # The latest command replaced earlier ones, so its answer is for all callers.
        for answered in self._waiting.get(engine_id, ()):
            if not answered.done():
                answered.set_result("" if refusal is None else refusal.message or "without a reason")


def _engine(member: Member) -> GroupEngine:
    facts = member.registration
    return GroupEngine(facts.engine_id, facts.engine_epoch, facts.dp_rank, member.state, facts.num_kv_blocks)


def _formed(formation: Formation) -> Formed:
    return Formed(
        generation=formation.preparing or formation.generation,
        size=len(formation.members),
        is_settled=formation.is_settled,
        is_changing_over=formation.phase is Phase.COMMITTING,
        num_answered=formation.num_answered,
        num_asked=formation.num_asked,
        num_failures=formation.num_failures,
        last_failure=formation.last_failure,
    )
