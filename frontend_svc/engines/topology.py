"""The engines and waves as a coordinator last told, and which coordinator is believed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from frontend_svc.engines.load_messages import load_of_engine
from frontend_svc.engines.routing.account import LoadReport
from triptych.coordinator.v1 import coordinator_pb2, member_pb2


class CoordinatorFence:
    """Which of several coordinators is believed: the newest, until nothing was heard of it for a lease."""

    def __init__(self) -> None:
        self.epoch = 0  # of the one that is believed; 0: none yet
        self.lease_s = 0.0  # that it gives to engines: for so long after its last word it is believed alone
        self._last_received_at = 0.0
        self._is_open = False  # the session in which it was heard last

    def admits(self, epoch: int, *, lease_s: float, now: float) -> bool:
        """Whether the coordinator of `epoch` is believed; notes that it was heard, if so."""
        if epoch < self.epoch and not self.has_lapsed(now):
            return False
        self.epoch, self.lease_s, self._last_received_at, self._is_open = epoch, lease_s, now, True
        return True

    def note_end(self, now: float) -> None:
        """The session has ended: if the one that is believed was heard in it, it was heard until now."""
        if self._is_open:
            self._is_open, self._last_received_at = False, now

    def has_lapsed(self, now: float) -> bool:
        """Whether the one that is believed was silent for so long that any other is believed next."""
        return not self._is_open and now >= self._last_received_at + self.lease_s


class Topology:
    """The engines as the coordinator last told: a snapshot, then deltas.

    Only those engines are there that have all of `wanted`: their labels, and their `host`, `dp_rank` and
    `dp_group`.
    """

    def __init__(self, wanted: Mapping[str, str] = MappingProxyType({})) -> None:
        self.version = 0
        self.coordinator_epoch = 0
        self._wanted = wanted
        self._members: dict[str, member_pb2.EngineMember] = {}
        self._waves: dict[str, member_pb2.WaveState] = {}
        self._hinted: dict[str, int] = {}  # the wave that was asked for last, by group
        self._loads: dict[str, LoadReport | None] = {}

    def apply(self, message: coordinator_pb2.FrontendSessionResponse) -> bool:
        """Take a message in; returns whether engines came, went or moved."""
        kind = message.WhichOneof("message")
        if kind == "delta" and not _has_members(message.delta):
            # Most messages have loads alone; with a thousand engines it counts what is done for each.
            self._take_figures(message.delta)
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
            self._take_figures(message.delta)
        self.version = message.version
        return self._endpoints() != before

    def forget_coordinator(self) -> None:
        """Ask the next coordinator for everything, whichever it is; what is known stays until it has told."""
        self.version = self.coordinator_epoch = 0

    def endpoints(self) -> list[str]:
        """Where the engines are."""
        return sorted(set(self._endpoints().values()))

    def take_loads(self) -> dict[str, LoadReport | None]:
        """The loads that were told since the last call, by endpoint; None of one that is UNREPORTED."""
        loads, self._loads = self._loads, {}
        return loads

    def hint(self, engine_id: str) -> coordinator_pb2.FirstRequestWhilePaused | None:
        """What to say of a request that goes to `engine_id` now: a hint where its group stands still.

        At most one for each wave of a group.
        """
        member = self._members.get(engine_id)
        if member is None or not member.registration.lockstep:
            return None
        group = member.registration.dp_group
        state = self._waves.get(group)
        if state is None or state.engines_running or self._hinted.get(group) == state.wave:
            return None
        self._hinted[group] = state.wave
        return coordinator_pb2.FirstRequestWhilePaused(dp_group=group, engine_id=engine_id, wave=state.wave)

    def _endpoints(self) -> dict[str, str]:
        return {engine_id: member.registration.endpoint for engine_id, member in self._members.items()}

    def _take_figures(self, delta: coordinator_pb2.TopologyDelta) -> None:
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
        facts["host"] = registration.host or registration.endpoint.rpartition(":")[0]
        facts["dp_rank"] = str(registration.dp_rank)
        facts["dp_group"] = registration.dp_group
        return all(facts.get(key) == value for key, value in self._wanted.items())

    def _take_load(self, load: member_pb2.EngineLoad) -> None:
        member = self._members.get(load.engine_id)
        if member is not None:
            self._loads[member.registration.endpoint] = load_of_engine(load)

    def _take_waves(self, waves: Iterable[member_pb2.WaveState]) -> None:
        for state in waves:
            held = self._waves.get(state.dp_group)
            # A wave never goes back, whatever order messages come in.
            if held is None or state.wave >= held.wave:
                self._waves[state.dp_group] = state


def _has_members(delta: coordinator_pb2.TopologyDelta) -> bool:
    return bool(delta.added or delta.updated or delta.removed_engine_ids)
