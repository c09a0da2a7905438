"""The engines and waves that the coordinator announced last, and fencing of old coordinators. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from frontend_svc.engines.load_messages import load_report
from frontend_svc.engines.routing.account import LoadReport
from triptych.coordinator.v1 import coordinator_pb2, member_pb2


class CoordinatorFence:
    """Accepts messages of one coordinator: the one of the highest epoch, until it is silent for a lease."""

    def __init__(self) -> None:
        self.epoch = 0  # of the accepted coordinator; 0: none yet
        # Its lease for engines: after its last message, the time in which no older coordinator is accepted.
        self.lease_s = 0.0
        self._last_received_at = 0.0
        self._is_open = False  # whether the session with its last message is still open

    def admits(self, epoch: int, *, lease_s: float, now: float) -> bool:
        """Whether a message of the coordinator of `epoch` is accepted; renews the lease if so."""
        if epoch < self.epoch and not self.has_lapsed(now):
            return False
        self.epoch, self.lease_s, self._last_received_at, self._is_open = epoch, lease_s, now, True
        return True

    def note_end(self, now: float) -> None:
        """The session has ended; if it was with the accepted coordinator, its lease starts now."""
        if self._is_open:
            self._is_open, self._last_received_at = False, now

    def has_lapsed(self, now: float) -> bool:
        """Whether the lease of the accepted coordinator has expired, so that any other is accepted next."""
        return not self._is_open and now >= self._last_received_at + self.lease_s


class Topology:
    """The engines that the coordinator announced: a snapshot, then deltas.

    Contains only engines that match all of `wanted`, by their labels or `host`, `dp_rank` and `dp_group`.
    """

    def __init__(self, wanted: Mapping[str, str] = MappingProxyType({})) -> None:
        self.version = 0
        self.coordinator_epoch = 0
        self._wanted = wanted
        self._members: dict[str, member_pb2.EngineMember] = {}
        self._waves: dict[str, member_pb2.WaveState] = {}
        self._hinted: dict[str, int] = {}  # the wave of the last hint, by group
        self._loads: dict[str, LoadReport | None] = {}

    def apply(self, message: coordinator_pb2.FrontendSessionResponse) -> bool:
        """Apply a message; returns whether engines joined, left or changed their endpoint."""
        kind = message.WhichOneof("message")
        if kind == "delta" and not _has_members(message.delta):
            # Most messages have loads only; with a thousand engines the work per engine matters.
            self._take_loads_and_waves(message.delta)
            self.version = message.version
            return False
        before = self._endpoints()
        if kind == "snapshot":
            if message.snapshot.coordinator_epoch != self.coordinator_epoch:
                self._hinted.clear()
            self.coordinator_epoch = message.snapshot.coordinator_epoch
            self._members, self._waves = {}, {}
            self._take(message.snapshot.engines)
            self._take_waves(message.snapshot.waves)
        elif kind == "delta":
            self._take(message.delta.added)
            self._take(message.delta.updated)
            for engine_id in message.delta.removed_engine_ids:
                self._members.pop(engine_id, None)
            self._take_loads_and_waves(message.delta)
        self.version = message.version
        return self._endpoints() != before

    def forget_coordinator(self) -> None:
        """Ask the next coordinator for a snapshot; the known engines stay until it arrives."""
        self.version = self.coordinator_epoch = 0

    def endpoints(self) -> list[str]:
        return sorted(set(self._endpoints().values()))

    def take_loads(self) -> dict[str, LoadReport | None]:
        """The loads received since the last call, by endpoint; None for an UNREPORTED engine."""
        loads, self._loads = self._loads, {}
        return loads

    def hint(self, engine_id: str) -> coordinator_pb2.FirstRequestWhilePaused | None:
        """A hint for a request sent to `engine_id` if its group is paused. At most one per group and wave."""
        member = self._members.get(engine_id)
        if member is None or not member.registration.lockstep:
            return None
        group = member.registration.dp_group
        state = self._waves.get(group)
        if state is None or state.engines_running or self._hinted.get(group) == state.wave:
            return None
        self._hinted[group] = state.wave
        return coordinator_pb2.FirstRequestWhilePaused(dp_group=group, engine_id=engine_id, wave=state.wave)

    def wave_of(self, engine_id: str) -> int | None:
        """The wave that runs in the group of an engine, or the next; None: it has none, or is not known."""
        member = self._members.get(engine_id)
        if member is None or not member.registration.lockstep:
            return None
        state = self._waves.get(member.registration.dp_group)
        return None if state is None else state.wave

    def _endpoints(self) -> dict[str, str]:
        return {engine_id: member.registration.endpoint for engine_id, member in self._members.items()}

    def _take_loads_and_waves(self, delta: coordinator_pb2.TopologyDelta) -> None:
        for load in delta.loads:
            self._take_load(load)
        self._take_waves(delta.waves)

    def _take(self, members: Iterable[member_pb2.EngineMember]) -> None:
        for member in members:
            registration = member.registration
            if member.state == member_pb2.MEMBER_STATE_GONE or not self._is_wanted(registration):
                self._members.pop(registration.engine_id, None)
                continue
            self._members[registration.engine_id] = member
            if member.state == member_pb2.MEMBER_STATE_UNREPORTED:
                self._loads[registration.endpoint] = None
            elif member.HasField("load"):
                self._take_load(member.load)

    def _is_wanted(self, registration: member_pb2.EngineRegistration) -> bool:
        facts = {label.key: label.value for label in registration.labels}
        facts["host"] = registration.host or registration.endpoint.rpartition(":")[0].strip("[]")
        facts["dp_rank"] = str(registration.dp_rank)
        facts["dp_group"] = registration.dp_group
        return all(facts.get(key) == value for key, value in self._wanted.items())

    def _take_load(self, load: member_pb2.EngineLoad) -> None:
        member = self._members.get(load.engine_id)
        if member is not None:
            self._loads[member.registration.endpoint] = load_report(load, load.engine_epoch)

    def _take_waves(self, waves: Iterable[member_pb2.WaveState]) -> None:
        for state in waves:
            held = self._waves.get(state.dp_group)
            # Wave numbers only grow, in whatever order messages arrive.
            if held is None or state.wave >= held.wave:
                self._waves[state.dp_group] = state


def _has_members(delta: coordinator_pb2.TopologyDelta) -> bool:
    return bool(delta.added or delta.updated or delta.removed_engine_ids)
