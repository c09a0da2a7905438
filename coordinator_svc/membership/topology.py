"""All that the coordinator knows, and the delta that a frontend has not received. Knows no streams."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from coordinator_svc.data_parallel.commands import Commands
from coordinator_svc.data_parallel.lockstep_groups import LockstepGroups
from coordinator_svc.membership.load import LoadTable
from coordinator_svc.membership.registry import EngineRegistry, Member, MemberState
from coordinator_svc.wire.convert import (
    from_load,
    from_member,
    to_interval_command,
    to_load_report,
    to_registration,
    to_state,
)
from coordinator_svc.wire.number_limits import check_report
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, member_pb2
from triptych_kit.errors import FailedPrecondition

logger = logging.getLogger(__name__)

MAX_NOTED = 4096
_MAX_EVICTED = 4096
MAX_REPORTS_PER_S = 2000
MIN_INTERVAL_S = 0.1  # the engines' default
# Headroom at each change, so that the next engine that joins or leaves does not change the interval again.
_ROOM = 1.25


class Topology:
    """Members with their loads, their lockstep groups, and the connected frontends.

    Soft state: registrations and reports rebuild it. coordinator_epoch: the start time in ns, so that
    generations and command ids that are derived from it are above those of every earlier coordinator.
    """

    def __init__(self, registry: EngineRegistry, *, coordinator_epoch: int) -> None:
        self.coordinator_epoch = coordinator_epoch
        self.epoch_check = EpochCheck(coordinator_epoch)
        self.frontends: dict[int, member_pb2.FrontendMember] = {}  # by session id
        self.commands = Commands(first_id=coordinator_epoch)
        self.groups = LockstepGroups(
            self.commands,
            registry.clock,
            first_generation=max(1, coordinator_epoch // 1_000_000),
            settled_at=registry.clock.now() + registry.lease_s,
        )
        self._registry = registry
        self._loads = LoadTable()
        # An engine reports at least three times in a lease, so that two renewals may be lost.
        self._report_interval = ReportInterval(max_s=registry.lease_s / 3)
        self._seen = Seen(frozenset(), 0, 0, 0)
        # The delta from each earlier `Seen.versions` to the present versions; cleared when these change.
        self._deltas: dict[tuple[int, int, int], coordinator_pb2.TopologyDelta] = {}
        self._evicted: OrderedDict[tuple[str, int], str] = OrderedDict()  # reason by (engine id, epoch)

    @property
    def version(self) -> int:
        """Grows with every change of members, waves or loads."""
        return self.members_version + self.groups.version + self.loads_version

    @property
    def members_version(self) -> int:
        """Grows with every change of members."""
        return self._registry.version

    @property
    def urgent_version(self) -> int:
        """Grows with every change of members or waves."""
        return self.members_version + self.groups.version

    @property
    def loads_version(self) -> int:
        """Grows with every change of loads."""
        return self._loads.version

    @property
    def num_stale_reports(self) -> int:
        """Load reports that were dropped because a newer one had arrived."""
        return self._loads.num_stale

    def engine_ids(self) -> set[str]:
        """The engines that are members."""
        return {member.registration.engine_id for member in self._registry.members()}

    def register_engine(self, message: member_pb2.EngineRegistration, session_id: int) -> Member:
        """Register an engine under a session, or update its facts if the session has it already."""
        registration = to_registration(message)
        self._check_evicted(message)
        if message.lockstep:
            self.groups.check_room(message.dp_group)
            self.groups.check_ahead(message.dp_group, "register", wave=message.wave)
        before = {member.registration.engine_id: member for member in self._registry.members()}
        member = self._registry.register(registration, session_id)
        for engine_id, earlier in before.items():
            if not self._is_same_process(earlier):
                self._forget(engine_id, has_ended=True)
        if registration.engine_id in before and before[registration.engine_id].session_id != session_id:
            self._loads.restart_order(registration.engine_id)
        return member

    def greet(self, engine_id: str) -> None:
        """Send the report interval to an engine with a new session, unless it is the default."""
        if not self._report_interval.is_default:
            self.commands.put(engine_id, to_interval_command(self._report_interval.seconds))
        self._pace_reports()

    def join_group(self, message: member_pb2.EngineRegistration) -> None:
        """Add a registered engine to its lockstep group; one without lockstep leaves any group."""
        if message.lockstep:
            self.groups.join(message)
        else:
            self.groups.leave(message.engine_id, has_ended=False)

    def take_report(self, engine_id: str, session_id: int, report: coordinator_pb2.EngineReport) -> Member:
        """Renew an engine's lease and store its state, and its load unless a newer one is known."""
        before = self._registry.find(engine_id)
        if before is None:
            raise FailedPrecondition(
                f"the lease of engine {engine_id} has expired: register again", reason="LEASE_ENDED"
            )
        check_report(report)
        if before.registration.is_lockstep:
            name = before.registration.dp_group
            self.groups.check_ahead(name, "report", wave=report.wave, generation=report.generation)
        member = self._registry.report(engine_id, session_id, to_state(report, before.state))
        if member.state is MemberState.GONE:
            self._forget(engine_id, has_ended=True)
            return member
        self.groups.report(engine_id, report)
        # A load with another epoch was measured by another process.
        if report.load.engine_epoch == member.registration.engine_epoch:
            self._loads.put(engine_id, to_load_report(report))
        return member

    def lose_engine(self, engine_id: str, session_id: int) -> None:
        """An engine's session ended without goodbye."""
        member = self._registry.find(engine_id)
        if member is not None and member.session_id == session_id:
            self._registry.lose_session(engine_id, session_id)
            self.groups.lose(engine_id)

    def leave_engine(self, engine_id: str, session_id: int) -> None:
        """Forget an engine that said goodbye."""
        self._registry.leave(engine_id, session_id)
        if self._registry.find(engine_id) is None:
            self._forget(engine_id, has_ended=True)

    def evict_engine(self, engine_id: str, reason: str) -> int:
        """Remove an engine; its process cannot register again. Returns the version without it."""
        member = self._registry.evict(engine_id)
        if member is not None:
            self._evicted[(engine_id, member.registration.engine_epoch)] = reason
            while len(self._evicted) > _MAX_EVICTED:
                self._evicted.popitem(last=False)
            self._forget(engine_id, has_ended=True)
        return self.version

    def num_in_flight(self, engine_id: str) -> int:
        """How many requests an engine has, by its newest report; 0 without a report."""
        report = self._loads.find(engine_id)
        return 0 if report is None else report.load.num_running + report.load.num_waiting

    def take_result(self, engine_id: str, result: command_pb2.CommandResult) -> None:
        """Apply an engine's answer to a command."""
        if self.commands.take_result(engine_id, result):
            self.groups.answered(engine_id)

    def expire(self) -> list[Member]:
        """Forget the members whose lease has ended, and return them."""
        gone = self._registry.expire()
        for member in gone:
            # An expired lease does not mean that the process has ended.
            self._forget(member.registration.engine_id, has_ended=False)
        return gone

    def snapshot(self) -> member_pb2.Topology:
        """All of it."""
        return member_pb2.Topology(
            version=self.version,
            engines=[self._member(member) for member in self._registry.members()],
            waves=self.groups.states(),
            coordinator_epoch=self.coordinator_epoch,
            lease_ms=round(self._registry.lease_s * 1000),
            frontends=list(self.frontends.values()),
        )

    def seen(self) -> Seen:
        """The state of a frontend that has received everything up to now."""
        engine_ids = self._seen.engine_ids
        if self._seen.members_version != self.members_version:
            engine_ids = frozenset(member.registration.engine_id for member in self._registry.members())
        now = Seen(engine_ids, self.members_version, self.groups.version, self.loads_version)
        if now.versions != self._seen.versions:
            self._seen = now
            self._deltas.clear()
        return self._seen

    def is_changed_since(self, seen: Seen) -> bool:
        """Whether members or waves have changed; such changes are published without delay."""
        return (self.members_version, self.groups.version) != (seen.members_version, seen.waves_version)

    def delta(self, seen: Seen) -> coordinator_pb2.TopologyDelta:
        """Changes since `seen`. The message is shared by all frontends with equal `seen`: do not modify."""
        self.seen()
        if seen.versions not in self._deltas:
            self._deltas[seen.versions] = self._delta(seen)
        return self._deltas[seen.versions]

    def _delta(self, seen: Seen) -> coordinator_pb2.TopologyDelta:
        delta = coordinator_pb2.TopologyDelta()
        delta.waves.extend(self.groups.states(since=seen.waves_version))
        for engine_id, report in self._loads.changed_since(seen.loads_version).items():
            delta.loads.append(from_load(engine_id, report))
        if seen.members_version == self.members_version:
            return delta
        present = {member.registration.engine_id: member for member in self._registry.members()}
        for engine_id, member in present.items():
            if engine_id not in seen.engine_ids:
                delta.added.append(self._member(member))
            elif member.version > seen.members_version:
                delta.updated.append(self._member(member))
        delta.removed_engine_ids.extend(sorted(seen.engine_ids - present.keys()))
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
            "num_stale_reports": self.num_stale_reports,
            "num_refused_as_stale": self.epoch_check.num_refused,
            "num_outstanding_commands": self.commands.num_outstanding,
            "num_refused_commands": self.commands.num_refused,
            **self.groups.status(),
        }

    def _check_evicted(self, message: member_pb2.EngineRegistration) -> None:
        reason = self._evicted.get((message.engine_id, message.engine_epoch))
        if reason is not None:
            raise FailedPrecondition(
                f"engine {message.engine_id} was evicted: {reason or 'no reason was given'}", reason="EVICTED"
            )

    def _forget(self, engine_id: str, *, has_ended: bool) -> None:
        self._loads.forget(engine_id)
        self.commands.forget(engine_id)
        self.groups.leave(engine_id, has_ended=has_ended)
        self._pace_reports()

    def _pace_reports(self) -> None:
        members = self._registry.members()
        if self._report_interval.follow(len(members)):
            for member in members:
                command = to_interval_command(self._report_interval.seconds)
                self.commands.put(member.registration.engine_id, command)

    def _is_same_process(self, earlier: Member) -> bool:
        """Whether the process of `earlier` is still the member of that id."""
        now = self._registry.find(earlier.registration.engine_id)
        return now is not None and now.registration.engine_epoch == earlier.registration.engine_epoch

    def _member(self, member: Member) -> member_pb2.EngineMember:
        return from_member(member, self._loads.find(member.registration.engine_id))


@dataclass(frozen=True, slots=True)
class Seen:
    """The versions that a frontend has received. Its next delta is the difference from these to now."""

    engine_ids: frozenset[str]
    members_version: int
    waves_version: int
    loads_version: int

    @property
    def versions(self) -> tuple[int, int, int]:
        return self.members_version, self.waves_version, self.loads_version


class ReportInterval:
    """The report interval by number of engines. max_s: its upper limit, which the lease sets."""

    def __init__(self, *, max_s: float) -> None:
        self.seconds = MIN_INTERVAL_S
        self._max_s = max(max_s, MIN_INTERVAL_S)

    @property
    def is_default(self) -> bool:
        """Whether it is the engines' default, which needs no command."""
        return self.seconds == MIN_INTERVAL_S

    def follow(self, num_engines: int) -> bool:
        """Adapt to the number of engines; returns whether the interval has changed."""
        least_s = num_engines / MAX_REPORTS_PER_S
        if least_s <= self.seconds < _ROOM * _ROOM * least_s:
            return False
        before, self.seconds = self.seconds, min(max(_ROOM * least_s, MIN_INTERVAL_S), self._max_s)
        return self.seconds != before


class EpochCheck:
    """Refuses sessions of engines and frontends that know a later coordinator.

    They retry until a lease has passed without contact with the other coordinator.
    """

    def __init__(self, own_epoch: int) -> None:
        self.num_refused = 0
        self._own_epoch = own_epoch
        self._logged: OrderedDict[str, int] = OrderedDict()  # the logged epoch by sender

    def check(self, sender: str, known: int) -> None:
        """Raise FailedPrecondition if `sender` knows a later epoch than this coordinator's."""
        if known <= self._own_epoch:
            self._logged.pop(sender, None)
            return
        self.num_refused += 1
        # Senders retry every second; log each epoch once.
        if self._logged.get(sender) != known:
            self._mark_logged(sender, known)
            # The field `who` is an alias of `sender` for one release.
            fields = {"sender": sender, "who": sender, "epoch": known, "own_epoch": self._own_epoch}
            logger.error("a newer coordinator is known", extra=fields)
        raise FailedPrecondition(
            f"{sender} knows coordinator epoch {known}, this coordinator has {self._own_epoch}:"
            " it is accepted here after a lease without contact with the other one",
            reason="STALE_COORDINATOR",
        )

    def _mark_logged(self, sender: str, known: int) -> None:
        self._logged[sender] = known
        self._logged.move_to_end(sender)
        while len(self._logged) > MAX_NOTED:
            self._logged.popitem(last=False)
