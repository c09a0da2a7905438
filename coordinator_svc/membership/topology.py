"""Everything the coordinator knows, and what one frontend has not heard of it yet. Knows no streams."""

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
from service_kit.errors import FailedPrecondition
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, member_pb2

logger = logging.getLogger(__name__)

MAX_NOTED = 4096
_MAX_EVICTED = 4096
MAX_REPORTS_PER_S = 2000
MIN_INTERVAL_S = 0.1  # what engines do by themselves
# So much room is left at each change, so that the next engine that comes or goes does not change it again.
_ROOM = 1.25


class Topology:
    """Members with their loads, their lockstep groups, and the frontends that listen.

    Soft state: registrations and reports refill it. coordinator_epoch: the time of the start in ns, so that
    generations and command ids that are derived from it are above those of every coordinator before.
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
        # Whatever changes, an engine reports three times in a lease: two renewals may be lost.
        self._report_interval = ReportInterval(max_s=registry.lease_s / 3)
        self._seen = Seen(frozenset(), 0, 0, 0)
        # What has changed since somebody was told last; it holds for the present versions only.
        self._deltas: dict[tuple[int, int, int], coordinator_pb2.TopologyDelta] = {}
        self._evicted: OrderedDict[tuple[str, int], str] = OrderedDict()  # processes, with the reason

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

    def register_engine(self, message: member_pb2.EngineRegistration, session_id: int) -> Member:
        """Enter an engine under a session, or note its new facts if the session has it already."""
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
        """An engine has a session, in which nothing was told yet: so far it reports as often as all may."""
        if not self._report_interval.is_default:
            self.commands.put(engine_id, to_interval_command(self._report_interval.seconds))
        self._pace_reports()

    def join_group(self, message: member_pb2.EngineRegistration) -> None:
        """Enter a registered engine into its lockstep group, if it says so."""
        if message.lockstep:
            self.groups.join(message)
        else:
            self.groups.leave(message.engine_id, has_ended=False)

    def take_report(self, engine_id: str, session_id: int, report: coordinator_pb2.EngineReport) -> Member:
        """Renew an engine's lease, note its state, and its load unless a newer one is known."""
        before = self._registry.find(engine_id)
        if before is None:
            raise FailedPrecondition(
                f"the lease of engine {engine_id} has ended: register again", reason="LEASE_ENDED"
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
        # A load of another epoch was measured by another process.
        if report.load.engine_epoch == member.registration.engine_epoch:
            self._loads.put(engine_id, to_load_report(report))
        return member

    def lose_engine(self, engine_id: str, session_id: int) -> None:
        """Note that an engine's session ended without goodbye."""
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
        """End a membership, for this process of that id for good; returns the version without it."""
        member = self._registry.evict(engine_id)
        if member is not None:
            self._evicted[(engine_id, member.registration.engine_epoch)] = reason
            while len(self._evicted) > _MAX_EVICTED:
                self._evicted.popitem(last=False)
            self._forget(engine_id, has_ended=True)
        return self.version

    def num_in_flight(self, engine_id: str) -> int:
        """How many requests an engine has, by its newest report; 0 where it has told none."""
        report = self._loads.find(engine_id)
        return 0 if report is None else report.load.num_running + report.load.num_waiting

    def take_result(self, engine_id: str, result: command_pb2.CommandResult) -> None:
        """Take in an engine's answer to a command."""
        if self.commands.take_result(engine_id, result):
            self.groups.answered(engine_id)

    def expire(self) -> list[Member]:
        """Forget the members whose lease has ended, and return them."""
        gone = self._registry.expire()
        for member in gone:
            # It is silent, which does not say for sure that it has ended.
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
        """What somebody has seen who is told everything now."""
        engine_ids = self._seen.engine_ids
        if self._seen.members_version != self.members_version:
            engine_ids = frozenset(member.registration.engine_id for member in self._registry.members())
        now = Seen(engine_ids, self.members_version, self.groups.version, self.loads_version)
        if now.versions != self._seen.versions:
            self._seen = now
            self._deltas.clear()
        return self._seen

    def is_changed_since(self, seen: Seen) -> bool:
        """Whether members or waves have changed, which nobody is to wait for."""
        return (self.members_version, self.groups.version) != (seen.members_version, seen.waves_version)

    def delta(self, seen: Seen) -> coordinator_pb2.TopologyDelta:
        """What changed since `seen`; the same message, not to be changed, for all who have seen the same."""
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
            "num_stale_reports": self._loads.num_stale,
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
        """Whether the engine that `earlier` was is still the member of that id."""
        now = self._registry.find(earlier.registration.engine_id)
        return now is not None and now.registration.engine_epoch == earlier.registration.engine_epoch

    def _member(self, member: Member) -> member_pb2.EngineMember:
        return from_member(member, self._loads.find(member.registration.engine_id))


@dataclass(frozen=True, slots=True)
class Seen:
    """What a frontend was told last. The next delta is the difference to now, whatever came in between."""

    engine_ids: frozenset[str]
    members_version: int
    waves_version: int
    loads_version: int

    @property
    def versions(self) -> tuple[int, int, int]:
        """What tells it from others of the same topology."""
        return self.members_version, self.waves_version, self.loads_version


class ReportInterval:
    """The interval for as many engines as there are. max_s: what it is never longer than, for the leases."""

    def __init__(self, *, max_s: float) -> None:
        self.seconds = MIN_INTERVAL_S
        self._max_s = max(max_s, MIN_INTERVAL_S)

    @property
    def is_default(self) -> bool:
        """Whether it is what engines do without being told."""
        return self.seconds == MIN_INTERVAL_S

    def follow(self, num_engines: int) -> bool:
        """Note how many engines there are; returns whether they have to be told another interval."""
        least_s = num_engines / MAX_REPORTS_PER_S
        if least_s <= self.seconds < _ROOM * _ROOM * least_s:
            return False
        before, self.seconds = self.seconds, min(max(_ROOM * least_s, MIN_INTERVAL_S), self._max_s)
        return self.seconds != before


class EpochCheck:
    """Refuses those who have heard of a later coordinator; they come again until their claim has lapsed."""

    def __init__(self, own_epoch: int) -> None:
        self.num_refused = 0
        self._own_epoch = own_epoch
        self._noted: OrderedDict[str, int] = OrderedDict()  # with the epoch that each knew

    def check(self, who: str, known: int) -> None:
        """Raise FailedPrecondition where `who` knows of a later epoch than this coordinator's."""
        if known <= self._own_epoch:
            self._noted.pop(who, None)
            return
        self.num_refused += 1
        # Once, as they ask every second.
        if self._noted.get(who) != known:
            self._note(who, known)
            fields = {"who": who, "epoch": known, "own_epoch": self._own_epoch}
            logger.error("a newer coordinator is known", extra=fields)
        raise FailedPrecondition(
            f"{who} knows coordinator epoch {known}, this coordinator has {self._own_epoch}: it is taken here"
            " when it has not heard of the other one for the time of a lease",
            reason="STALE_COORDINATOR",
        )

    def _note(self, who: str, known: int) -> None:
        self._noted[who] = known
        self._noted.move_to_end(who)
        while len(self._noted) > MAX_NOTED:
            self._noted.popitem(last=False)
