"""Two-phase (prepare, commit) membership of a lockstep group. Knows no streams and no protos.

A generation is an ordered list of engines under a number that is never used twice. It changes in two phases:
every engine prepares what it needs while the present generation runs, and only when all are prepared are they
ordered to change over. The engines' reports are the truth: a coordinator that has restarted relies on them.

What an engine is assumed to do:
- It is ready (`RankReport.is_loaded`) when it reports READY, or the notice WEIGHTS_READY, which it repeats in
  each report while it is LOADING; it becomes READY once its first generation is formed.
- It answers Prepare when it holds the experts it will need; an engine that is to leave, when it has no
  requests left. It refuses a number that is not greater than all it has received, unless the order is a
  repetition.
- It answers Commit when it has changed over and the ranks have connected, and then reports the new
  generation. It stops waiting for missing ranks by itself, or on a Commit with a greater number.
- On Abort it discards what it prepared; Abort has no effect after Commit. It also discards what is prepared
  and not committed when it registers with a coordinator of another epoch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from coordinator_svc.data_parallel.ranks import Rank, RankReport, Ranks
from triptych_kit.errors import InvalidTransition


@dataclass(frozen=True, slots=True)
class Prepare:
    """Prepare to be `rank` of `size` in a generation that connects at the store of its rank 0."""

    generation: int
    size: int
    rank: int | None  # None: leave the group and exit
    host: str
    store_port: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Change over to a prepared generation."""

    generation: int
    lost_generation: int = 0  # the newest one of which a member has ended, so that no vote in it can complete


@dataclass(frozen=True, slots=True)
class Abort:
    """Discard a prepared generation."""

    generation: int


Order: TypeAlias = Prepare | Commit | Abort


class Phase(Enum):
    """The phase of a group's membership change."""

    RESTING = "resting"  # no change in progress; the group may wait for engines or for the next retry
    PREPARING = "preparing"
    COMMITTING = "committing"  # some engine may have changed over already


_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.RESTING: frozenset({Phase.PREPARING}),
    Phase.PREPARING: frozenset({Phase.COMMITTING, Phase.RESTING}),
    Phase.COMMITTING: frozenset({Phase.RESTING}),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a group waits."""

    grace_s: float = 0.3  # for an engine without a session to reconnect
    gather_s: float = 10.0  # for more engines to join in the same change, while a group runs
    silence_s: float = 2.0  # for an engine with an expired lease to return, or for the other leases to expire
    prepare_s: float = 600.0
    commit_s: float = 60.0
    first_retry_s: float = 0.25  # after the second failed attempt in a row; doubled after each further one
    max_retry_s: float = 30.0


@dataclass(slots=True)
class _Attempt:
    generation: int
    members: tuple[str, ...]  # in order of rank
    leavers: frozenset[str]
    epochs: dict[str, int]
    ends_by: float
    waiting: set[str]  # engines that have not answered in this phase
    confirmed: set[str] = field(default_factory=set)  # engines that have reported this generation


class Formation:
    """The membership of one lockstep group. Pass it events, then call `step`, then send its `orders`.

    first_generation: the first number to assign. A coordinator that derives it from its start time never
    reuses a number of an earlier coordinator, even if no engine remembers it.
    settled_at: until then a coordinator that has just started does not treat missing engines as gone.
    """

    def __init__(
        self, *, first_generation: int = 1, settled_at: float = 0.0, limits: Limits | None = None
    ) -> None:
        self.phase = Phase.RESTING
        self.last_failure = ""  # of the latest attempt; "" once a generation is formed
        self.num_failures = 0  # in a row
        self._limits = limits or Limits()
        self._ranks = Ranks()
        self._settled_at = settled_at
        self._last_given = first_generation - 1
        self._size: int | None = None
        self._leaving: frozenset[str] = frozenset()
        self._attempt: _Attempt | None = None
        self._not_before = 0.0
        self._orders: dict[str, Order] = {}
        self._next_at: float | None = None

    @property
    def generation(self) -> int:
        """The generation that most engines report; 0: none."""
        return self._ranks.generation

    @property
    def newest(self) -> int:
        """The greatest generation that was ever assigned here or reported."""
        return max(self._last_given, self._ranks.newest)

    @property
    def members(self) -> tuple[str, ...]:
        """The engines of `generation`, in order of rank."""
        return self._ranks.formed

    @property
    def preparing(self) -> int:
        """The generation that is being prepared or committed; 0: none."""
        return self._attempt.generation if self._attempt else 0

    @property
    def target_size(self) -> int:
        """How many members are wanted: set by `resize`, else the size the engines were started with."""
        return self._size if self._size is not None else self._ranks.size

    @property
    def is_settled(self) -> bool:
        """Whether the formed generation has the wanted engines, all `target_size` of them."""
        members = self._ranks.formed
        return self._attempt is None and self._is_as_wanted() and len(members) == self.target_size

    @property
    def num_answered(self) -> int:
        """How many engines have answered in the present phase."""
        if self._attempt is None:
            return 0
        return self.num_asked - len(self._attempt.waiting)

    @property
    def num_asked(self) -> int:
        """How many engines the present phase needs an answer from."""
        if self._attempt is None:
            return 0
        return len(self._attempt.members) + len(self._attempt.leavers)

    def join(self, rank: Rank) -> None:
        """An engine has registered, for the first time or again. Another epoch is another process."""
        if self._epoch(rank.engine_id) != rank.engine_epoch:
            self._orders.pop(rank.engine_id, None)
        self._ranks.join(rank)

    def report(self, engine_id: str, report: RankReport, now: float) -> None:
        self._ranks.report(engine_id, report, now)

    def lose(self, engine_id: str, now: float) -> None:
        """The session of an engine is lost. This alone does not remove an engine from a running group."""
        self._ranks.lose(engine_id, now)

    def leave(self, engine_id: str, now: float, *, has_ended: bool) -> None:
        """An engine is no longer a member. has_ended: its process is known to have ended, not only silent."""
        self._ranks.leave(engine_id, now, has_ended=has_ended)
        self._orders.pop(engine_id, None)

    def answer(self, engine_id: str, order: Order, now: float, *, refusal: str | None = None) -> None:
        """An engine has accepted an order, or refused it with a reason. Answers to old orders are ignored."""
        if self._orders.get(engine_id) != order:
            return
        del self._orders[engine_id]
        attempt = self._attempt
        if attempt is None or isinstance(order, Abort) or order.generation != attempt.generation:
            return
        if refusal is not None:
            self._fail(f"engine {engine_id} refuses generation {order.generation}: {refusal}", now)
        else:
            attempt.waiting.discard(engine_id)

    def resize(self, size: int | None, leaving: Collection[str] = ()) -> None:
        """Set the wanted size (None: the size the engines were started with) and the engines that must leave.

        Takes effect at the next step: an attempt that is being prepared is aborted for it, one that is being
        committed is completed first. To revert it, call it with the former values.
        """
        self._size = size
        self._leaving = frozenset(leaving)

    def step(self, now: float) -> None:
        """Advance the state machine. To be called after events, and at `next_at`."""
        self._next_at = self._ranks.give_up_silent(now, self._limits.silence_s)
        # The order ensures that an attempt that is begun in this step is not ended in the same step.
        if self.phase is Phase.COMMITTING:
            self._watch_commit(now)
        if self.phase is Phase.PREPARING:
            self._watch_prepare(now)
        if self.phase is Phase.RESTING:
            self._consider(now)

    def orders(self) -> dict[str, Order]:
        """The order that each engine has not answered yet, by engine id."""
        return dict(self._orders)

    def next_at(self) -> float | None:
        """When to call `step` if there is no event before; None: only after an event."""
        return self._next_at

    def _consider(self, now: float) -> None:
        """Begin an attempt if the group is not as wanted and there is nothing to wait for."""
        wanted = self._wanted()
        # If all engines leave, they leave together, as a generation without members: each steps until no
        # other needs it.
        if self._is_as_wanted() or not (wanted or self._ranks.are_all_leaving):
            return
        wait_until = max(self._not_before, self._wait_until(wanted))
        if now >= wait_until:
            self._prepare(wanted, now)
        elif wait_until != float("inf"):
            self._look_again(wait_until)

    def _wait_until(self, wanted: tuple[str, ...]) -> float:
        """The time before which the group should not be changed. inf: until there is an event."""
        ranks = self._ranks
        is_complete = len(wanted) >= self.target_size
        if not ranks.is_founded:
            return 0.0 if is_complete else float("inf")
        # A coordinator that has just started waits for engines that have not registered with it yet.
        settled_at = 0.0 if len(ranks) >= self.target_size else self._settled_at
        broken_at = ranks.broken_at
        if broken_at is not None:
            is_missing = ranks.has_lost or ranks.generation > 0
            return max(settled_at, broken_at + self._limits.grace_s if is_missing else 0.0)
        # A member that is disconnected only from here still steps with the others, which cannot change over
        # without it.
        if ranks.has_lost_formed:
            return float("inf")
        if is_complete or ranks.is_reduced:
            return settled_at
        return max(settled_at, ranks.fresh_since(wanted) + self._limits.gather_s)

    def _prepare(self, members: tuple[str, ...], now: float) -> None:
        self._last_given = self.newest + 1
        leavers = self._ranks.leavers(members)
        involved = (*members, *leavers)
        self._attempt = _Attempt(
            generation=self._last_given,
            members=members,
            leavers=frozenset(leavers),
            epochs={engine_id: self._epoch(engine_id) for engine_id in involved},
            ends_by=now + self._limits.prepare_s,
            waiting=set(involved),
        )
        self._move_to(Phase.PREPARING)
        self._orders = {id_: self._prepare_order(self._last_given, members, id_) for id_ in involved}
        self._look_again(self._attempt.ends_by)

    def _watch_prepare(self, now: float) -> None:
        attempt = self._running()
        if self._is_as_wanted() or self._is_overtaken(attempt):
            self._give_up(attempt)
            return
        missing = self._missing(attempt.members, now)
        if missing:
            self._fail(f"engine {missing} is gone while generation {attempt.generation} is prepared", now)
            return
        attempt.waiting -= {id_ for id_ in attempt.leavers if self._missing((id_,), now)}
        if not attempt.waiting:
            self._commit(attempt, now)
        elif now >= attempt.ends_by:
            slow = ", ".join(sorted(attempt.waiting))
            self._fail(f"not ready within {self._limits.prepare_s:g} s: {slow}", now)
        else:
            self._look_again(attempt.ends_by)

    def _commit(self, attempt: _Attempt, now: float) -> None:
        involved = [id_ for id_ in (*attempt.members, *attempt.leavers) if self._is_same(attempt, id_)]
        attempt.waiting = set(involved)
        attempt.ends_by = now + self._limits.commit_s
        self._move_to(Phase.COMMITTING)
        commit = Commit(attempt.generation, self._ranks.reduced)
        self._orders = dict.fromkeys(involved, commit)
        self._look_again(attempt.ends_by)

    def _watch_commit(self, now: float) -> None:
        attempt = self._running()
        generation = attempt.generation
        reporting = {id_ for id_ in attempt.members if self._ranks.of(id_).generation == generation}
        open_ids = {id_ for id_ in attempt.members if self._is_open(attempt, id_)}
        if open_ids <= reporting and (reporting or self._have_all_left(attempt)):
            self._formed(attempt)
            return
        apart = sorted(attempt.confirmed - reporting)
        attempt.confirmed |= reporting
        missing = self._missing(attempt.members, now)
        if apart:
            self._fail(f"engine {apart[0]} has lost generation {generation} again", now)
        elif missing:
            self._fail(f"engine {missing} is gone while generation {generation} is formed", now)
        elif now >= attempt.ends_by:
            slow = ", ".join(sorted(open_ids - reporting or attempt.leavers))
            self._fail(f"generation {generation} not formed within {self._limits.commit_s:g} s: {slow}", now)
        else:
            self._look_again(attempt.ends_by)

    def _formed(self, attempt: _Attempt) -> None:
        self._rest()
        self.num_failures, self.last_failure = 0, ""
        # Orders to leaving engines stay: one that was disconnected would otherwise wait for ever.
        self._orders = {id_: order for id_, order in self._orders.items() if id_ in attempt.leavers}

    def _give_up(self, attempt: _Attempt) -> None:
        """Abort an attempt that is being prepared; no engine has changed over."""
        prepared = [id_ for id_ in attempt.epochs if self._is_same(attempt, id_)]
        self._rest()
        self._orders = {engine_id: Abort(attempt.generation) for engine_id in prepared}

    def _fail(self, why: str, now: float) -> None:
        attempt = self._running()
        if self.phase is Phase.PREPARING:
            self._give_up(attempt)
        else:
            self._rest()
            self._orders = {}
        self.last_failure = why
        self.num_failures += 1
        retry_s = self._limits.first_retry_s * 2.0 ** min(self.num_failures - 2, 16)
        self._not_before = now + (min(retry_s, self._limits.max_retry_s) if self.num_failures > 1 else 0.0)

    def _rest(self) -> None:
        self._move_to(Phase.RESTING)
        self._attempt = None

    def _move_to(self, phase: Phase) -> None:
        if phase not in _TRANSITIONS[self.phase]:
            raise InvalidTransition(f"a group that is {self.phase.value} cannot become {phase.value}")
        self.phase = phase

    def _wanted(self) -> tuple[str, ...]:
        return self._ranks.candidates(self._leaving, self.target_size)

    def _is_as_wanted(self) -> bool:
        formed = [id_ for id_ in self._ranks.formed if self._ranks.is_open(id_)]
        return bool(formed) and tuple(formed) == self._wanted() and not self._ranks.is_reduced

    def _is_overtaken(self, attempt: _Attempt) -> bool:
        """Whether a member of the attempt must now leave, or one of its leavers must now stay."""
        wanted = set(self._wanted())
        staying = {id_ for id_ in attempt.members if self._is_open(attempt, id_)}
        return not staying <= wanted or not wanted.isdisjoint(attempt.leavers)

    def _missing(self, engine_ids: Collection[str], now: float) -> str | None:
        """The first of these engines that has restarted, is gone, or is lost for longer than the grace."""
        attempt = self._running()
        for engine_id in engine_ids:
            if not self._is_same(attempt, engine_id):
                return engine_id
            lost_at = self._ranks.lost_at(engine_id)
            if lost_at is not None:
                if now >= lost_at + self._limits.grace_s:
                    return engine_id
                self._look_again(lost_at + self._limits.grace_s)
        return None

    def _is_same(self, attempt: _Attempt, engine_id: str) -> bool:
        return self._epoch(engine_id) == attempt.epochs.get(engine_id)

    def _is_open(self, attempt: _Attempt, engine_id: str) -> bool:
        return self._is_same(attempt, engine_id) and self._ranks.is_open(engine_id)

    def _have_all_left(self, attempt: _Attempt) -> bool:
        """Whether the attempt has no members, and none of its leavers is in a generation."""
        still_in = (id_ for id_ in attempt.leavers if self._is_open(attempt, id_))
        return not attempt.members and not any(self._ranks.of(id_).generation for id_ in still_in)

    def _epoch(self, engine_id: str) -> int:
        rank = self._ranks.find(engine_id)
        return rank.engine_epoch if rank else 0

    def _prepare_order(self, generation: int, members: tuple[str, ...], engine_id: str) -> Prepare:
        first = self._ranks.find(members[0]) if members else None
        rank = members.index(engine_id) if engine_id in members else None
        host, store_port = (first.host, first.store_port) if first else ("", 0)
        return Prepare(generation, len(members), rank, host, store_port)

    def _running(self) -> _Attempt:
        assert self._attempt is not None, f"no attempt in phase {self.phase.value}"
        return self._attempt

    def _look_again(self, at: float) -> None:
        self._next_at = at if self._next_at is None else min(self._next_at, at)
