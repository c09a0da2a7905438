"""Registered engines as members with a state and a lease. Knows no gRPC, no protos and no loads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from triptych_kit.clock import Clock
from triptych_kit.errors import AlreadyExists, FailedPrecondition, InvalidTransition, ResourceExhausted

MAX_MEMBERS = 4096
# Loading can keep an engine from reporting for seconds: importing a library from a cold disk stops every
# thread of the process. No request waits for an engine that loads, so its silence may last this many leases.
_JOINING_LEASES = 20


class MemberState(Enum):
    """Lifecycle of an engine. A lost session is not a state: see `Member.is_reporting`."""

    JOINING = "joining"  # registered, still loading
    READY = "ready"
    DRAINING = "draining"  # finishes its requests, accepts no new ones
    GONE = "gone"


_TRANSITIONS: dict[MemberState, frozenset[MemberState]] = {
    MemberState.JOINING: frozenset({MemberState.READY, MemberState.DRAINING, MemberState.GONE}),
    MemberState.READY: frozenset({MemberState.DRAINING, MemberState.GONE}),
    # Back to READY when a scale-down that included the engine was cancelled.
    MemberState.DRAINING: frozenset({MemberState.READY, MemberState.GONE}),
    MemberState.GONE: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Registration:
    """The identity and the address that an engine declares when it registers."""

    engine_id: str
    engine_epoch: int  # random at process start: distinguishes a restarted engine from the one before
    endpoint: str  # "host:port" that frontends dial
    dp_group: str = ""
    dp_rank: int = 0
    dp_size: int = 1
    is_lockstep: bool = False
    parallel_config_hash: str = ""  # "": no lockstep, or not known yet while the engine loads
    num_kv_blocks: int = 0  # 0: not known yet while the engine loads
    facts: bytes = b""  # the whole registration message, passed on to frontends unread


@dataclass(frozen=True, slots=True)
class Member:
    """One engine as the coordinator sees it now. Immutable: the registry replaces it on every change."""

    registration: Registration
    session_id: int | None  # None: the session is lost; the engine may still be alive
    version: int  # the registry's version when this member last changed
    state: MemberState = MemberState.JOINING

    @property
    def is_reporting(self) -> bool:
        """Whether a session is open; False is UNREPORTED, which frontends may still route to."""
        return self.session_id is not None

    def move_to(self, state: MemberState, version: int) -> Member:
        """This member in `state`; raises InvalidTransition if the table has no such move."""
        if state not in _TRANSITIONS[self.state]:
            raise InvalidTransition(f"member cannot move from {self.state.name} to {state.name}")
        return replace(self, state=state, version=version)


class EngineRegistry:
    """Every engine that registered and whose lease runs. All of it is rebuilt when engines register again.

    A member lives under its engine id. `version` grows by one with each visible change, and each member
    carries the version of its own last change, so a subscriber's delta is a comparison of numbers.
    """

    def __init__(self, clock: Clock, *, lease_s: float) -> None:
        self.version = 1
        self.lease_s = lease_s
        self.clock = clock
        self._members: dict[str, Member] = {}
        self.num_expired = 0
        self._lease_ends_at: dict[str, float] = {}
        self._expired_at = clock.now()

    def members(self) -> list[Member]:
        """All members, in order of first registration."""
        return list(self._members.values())

    def find(self, engine_id: str) -> Member | None:
        """The member of that id, or None."""
        return self._members.get(engine_id)

    def leases_left_s(self) -> dict[str, float]:
        """The time until the lease of each member ends."""
        now = self.clock.now()
        return {engine_id: max(0.0, ends_at - now) for engine_id, ends_at in self._lease_ends_at.items()}

    def register(self, registration: Registration, session_id: int) -> Member:
        """Enter an engine, or let one that lost its session continue, and start its lease.

        The same epoch is the same process: its newest session replaces an older one, which may be half open.
        Another epoch replaces an engine whose session is lost, since that engine has restarted, and is
        refused with AlreadyExists while the session of the earlier process is open. An engine whose parallel
        configuration differs from that of its group is refused with FailedPrecondition.
        """
        rivals = self._rivals(registration)
        for rival in rivals:
            if rival.is_reporting:
                raise _rank_taken(registration, rival)
        self._check_parallel_config(registration, rivals)
        is_new = registration.engine_id not in self._members
        if is_new and len(self._members) - len(rivals) >= MAX_MEMBERS:
            raise ResourceExhausted(f"{MAX_MEMBERS} engines are registered, which is the limit")
        # Nothing is changed above this line: a refusal leaves everything as it was.
        for rival in rivals:
            self._forget(rival.registration.engine_id)
        present = self._members.get(registration.engine_id)
        if present is not None and (present.registration, present.session_id) == (registration, session_id):
            self._renew(registration.engine_id)
            return present
        self.version += 1
        state = present.state if present else MemberState.JOINING
        member = Member(registration, session_id, self.version, state)
        self._members[registration.engine_id] = member
        self._renew(registration.engine_id)
        return member

    def report(self, engine_id: str, session_id: int, state: MemberState) -> Member:
        """Renew the lease of an engine and note its state.

        Raises FailedPrecondition if it has to register again, or if the state cannot follow the one before.
        """
        member = self._members.get(engine_id)
        if member is None or member.session_id != session_id:
            raise FailedPrecondition(
                f"engine {engine_id} holds no lease under this session: register again", reason="LEASE_ENDED"
            )
        if state is member.state:
            self._renew(engine_id)
            return member
        if state not in _TRANSITIONS[member.state]:
            raise FailedPrecondition(
                f"engine {engine_id} reports {state.name} after {member.state.name}", reason="WRONG_STATE"
            )
        self.version += 1
        moved = member.move_to(state, self.version)
        if state is MemberState.GONE:
            self._forget(engine_id)
        else:
            self._members[engine_id] = moved
            self._renew(engine_id)
        return moved

    def lose_session(self, engine_id: str, session_id: int) -> None:
        """A session ended without goodbye. Its engine stays a member until the lease ends."""
        member = self._members.get(engine_id)
        if member is not None and member.session_id == session_id:
            self.version += 1
            self._members[engine_id] = replace(member, session_id=None, version=self.version)
            ends_at = self.clock.now() + self.lease_s
            self._lease_ends_at[engine_id] = min(self._lease_ends_at[engine_id], ends_at)

    def leave(self, engine_id: str, session_id: int) -> None:
        """Forget an engine that said goodbye."""
        member = self._members.get(engine_id)
        if member is not None and member.session_id == session_id:
            self.version += 1
            self._forget(engine_id)

    def evict(self, engine_id: str) -> Member | None:
        """Forget an engine unconditionally and return its last state; its next report is refused."""
        member = self._members.get(engine_id)
        if member is not None:
            self.version += 1
            self._forget(engine_id)
        return member

    def expire(self) -> list[Member]:
        """Forget the members whose lease has ended, and return them as GONE.

        To be called several times in a lease. When the last call is more than half a lease ago, the
        coordinator was suspended, not the engines: their renewals are still unread, so every lease is
        extended by that gap.
        """
        now = self.clock.now()
        gap_s = now - self._expired_at
        self._expired_at = now
        if gap_s > self.lease_s / 2:
            for engine_id in self._lease_ends_at:
                self._lease_ends_at[engine_id] += gap_s
        ended = [engine_id for engine_id, ends_at in self._lease_ends_at.items() if ends_at <= now]
        gone = []
        for engine_id in ended:
            self.version += 1
            gone.append(self._members[engine_id].move_to(MemberState.GONE, self.version))
            self._forget(engine_id)
        self.num_expired += len(gone)
        return gone

    def _rivals(self, registration: Registration) -> list[Member]:
        """Members of other processes that have the engine id or the rank of this registration."""
        return [
            member
            for member in self._members.values()
            if _claims_same_rank(member.registration, registration)
            and (member.registration.engine_id, member.registration.engine_epoch)
            != (registration.engine_id, registration.engine_epoch)
        ]

    def _check_parallel_config(self, registration: Registration, rivals: list[Member]) -> None:
        """Raise FailedPrecondition if a member of the same group has another parallel configuration."""
        for member in self._members.values():
            held = member.registration
            is_other = held.engine_id != registration.engine_id and member not in rivals
            if is_other and held.dp_group == registration.dp_group and _differ(held, registration):
                raise FailedPrecondition(
                    f"parallel_config_hash of engine {registration.engine_id} is {_config(registration)},"
                    f" that of engine {held.engine_id} in group {held.dp_group!r} is {_config(held)}",
                    reason="PARALLEL_CONFIG_MISMATCH",
                    metadata={"hash": registration.parallel_config_hash, "held": held.parallel_config_hash},
                )

    def _renew(self, engine_id: str) -> None:
        is_joining = self._members[engine_id].state is MemberState.JOINING
        lease_s = self.lease_s * (_JOINING_LEASES if is_joining else 1)
        self._lease_ends_at[engine_id] = self.clock.now() + lease_s

    def _forget(self, engine_id: str) -> None:
        del self._members[engine_id]
        del self._lease_ends_at[engine_id]


def _claims_same_rank(one: Registration, other: Registration) -> bool:
    if one.engine_id == other.engine_id:
        return True
    if one.dp_size == 1 or other.dp_size == 1:
        return False
    return (one.dp_group, one.dp_rank) == (other.dp_group, other.dp_rank)


def _differ(held: Registration, registration: Registration) -> bool:
    if not held.is_lockstep and not registration.is_lockstep:
        return False
    if any(one.dp_size == 1 and not one.is_lockstep for one in (held, registration)):
        # An engine with dp_size 1 and without lockstep is independent, whatever group it names.
        return False
    hashes = {held.parallel_config_hash, registration.parallel_config_hash}
    return held.is_lockstep != registration.is_lockstep or ("" not in hashes and len(hashes) == 2)


def _config(registration: Registration) -> str:
    if not registration.is_lockstep:
        return "unset (no lockstep)"
    return repr(registration.parallel_config_hash)


def _rank_taken(registration: Registration, rival: Member) -> AlreadyExists:
    held = rival.registration
    if held.engine_id == registration.engine_id:
        claim = f"engine id {held.engine_id}"
    else:
        claim = f"data-parallel rank {held.dp_rank} of group {held.dp_group!r}"
    return AlreadyExists(f"{claim} is held by a live engine at {held.endpoint}")
