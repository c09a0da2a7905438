"""Everything the coordinator knows, and what one frontend has not heard of it yet. Knows no streams."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator_svc.convert import from_load, from_member, to_load_report, to_registration, to_state
from coordinator_svc.load import LoadTable
from coordinator_svc.registry import EngineRegistry, Member, MemberState
from service_kit.errors import FailedPrecondition
from triptych.coordinator.v1 import coordinator_pb2, member_pb2


@dataclass(frozen=True, slots=True)
class Seen:
    """What a frontend was told last. The next delta is the difference to now, whatever came in between."""

    engine_ids: frozenset[str]
    members_version: int
    loads_version: int


class Topology:
    """Members with their loads, and the frontends that listen. Soft state: registrations refill it."""

    def __init__(self, registry: EngineRegistry, *, coordinator_epoch: int) -> None:
        self.coordinator_epoch = coordinator_epoch
        self.frontends: dict[int, member_pb2.FrontendMember] = {}  # by session id
        self._registry = registry
        self._loads = LoadTable()

    @property
    def version(self) -> int:
        """Grows with every change of members or loads."""
        return self.members_version + self.loads_version

    @property
    def members_version(self) -> int:
        """Grows with every change of members."""
        return self._registry.version

    @property
    def loads_version(self) -> int:
        """Grows with every change of loads."""
        return self._loads.version

    def register_engine(self, message: member_pb2.EngineRegistration, session_id: int) -> Member:
        """Enter an engine under a session, or note its new facts if the session has it already."""
        registration = to_registration(message)
        before = {member.registration.engine_id: member for member in self._registry.members()}
        member = self._registry.register(registration, session_id)
        for engine_id, earlier in before.items():
            if not self._is_same_process(earlier):
                self._loads.forget(engine_id)
        if registration.engine_id in before and before[registration.engine_id].session_id != session_id:
            self._loads.restart_order(registration.engine_id)
        return member

    def take_report(self, engine_id: str, session_id: int, report: coordinator_pb2.EngineReport) -> Member:
        """Renew an engine's lease, note its state, and its load unless a newer one is known."""
        before = self._registry.find(engine_id)
        if before is None:
            raise FailedPrecondition(
                f"the lease of engine {engine_id} has ended: register again", reason="LEASE_ENDED"
            )
        member = self._registry.report(engine_id, session_id, to_state(report, before.state))
        if member.state is MemberState.GONE:
            self._loads.forget(engine_id)
        # A load of another epoch was measured by another process.
        elif report.load.engine_epoch == member.registration.engine_epoch:
            self._loads.put(engine_id, to_load_report(report))
        return member

    def lose_engine(self, engine_id: str, session_id: int) -> None:
        """Note that an engine's session ended without goodbye."""
        self._registry.lose_session(engine_id, session_id)

    def leave_engine(self, engine_id: str, session_id: int) -> None:
        """Forget an engine that said goodbye."""
        self._registry.leave(engine_id, session_id)
        if self._registry.find(engine_id) is None:
            self._loads.forget(engine_id)

    def expire(self) -> list[Member]:
        """Forget the members whose lease has ended, and return them."""
        gone = self._registry.expire()
        for member in gone:
            self._loads.forget(member.registration.engine_id)
        return gone

    def snapshot(self) -> member_pb2.Topology:
        """All of it."""
        return member_pb2.Topology(
            version=self.version,
            engines=[self._member(member) for member in self._registry.members()],
            coordinator_epoch=self.coordinator_epoch,
            frontends=list(self.frontends.values()),
        )

    def seen(self) -> Seen:
        """What somebody has seen who is told everything now."""
        engine_ids = frozenset(member.registration.engine_id for member in self._registry.members())
        return Seen(engine_ids, self.members_version, self.loads_version)

    def delta(self, seen: Seen) -> coordinator_pb2.TopologyDelta:
        """What changed since `seen`."""
        delta = coordinator_pb2.TopologyDelta()
        present = {member.registration.engine_id: member for member in self._registry.members()}
        for engine_id, member in present.items():
            if engine_id not in seen.engine_ids:
                delta.added.append(self._member(member))
            elif member.version > seen.members_version:
                delta.updated.append(self._member(member))
        delta.removed_engine_ids.extend(sorted(seen.engine_ids - present.keys()))
        for engine_id, report in self._loads.changed_since(seen.loads_version).items():
            delta.loads.append(from_load(engine_id, report))
        return delta

    def status(self) -> dict[str, str | int | float]:
        """Facts and counters for operators."""
        members = self._registry.members()
        return {
            "coordinator_epoch": f"{self.coordinator_epoch:016x}",
            "version": self.version,
            "num_engines": len(members),
            "num_ready": sum(member.state is MemberState.READY for member in members),
            "num_unreported": sum(not member.is_reporting for member in members),
            "num_frontends": len(self.frontends),
            "num_stale_reports": self._loads.num_stale,
        }

    def _is_same_process(self, earlier: Member) -> bool:
        """Whether the engine that `earlier` was is still the member of that id."""
        now = self._registry.find(earlier.registration.engine_id)
        return now is not None and now.registration.engine_epoch == earlier.registration.engine_epoch

    def _member(self, member: Member) -> member_pb2.EngineMember:
        return from_member(member, self._loads.find(member.registration.engine_id))
