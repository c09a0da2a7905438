"""Where requests go that lost their engine or found none: how often, how soon, how long they wait for one.

Callbacks and timers alone: no task runs for a request that waits, and ending it takes all of it away at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from frontend_svc.engines.connection.client import EngineClient
from frontend_svc.engines.directory import Directory
from frontend_svc.engines.routing.engine_info import RoutingRequest
from frontend_svc.generation.suspects import PoisonQuarantine, Suspect, in_order
from frontend_svc.output.loss import RETRY_AFTER_MS, LossKind
from frontend_svc.text.model import ServedModel
from service_kit.clock import Clock
from service_kit.errors import Internal, ResourceExhausted, ServiceError, Unavailable

_CAPACITY = 1024.0
_GIVEN_BACK = 0.1
_PER_SECOND = 1.0


class RetryBudget:
    """Starts full; a repetition takes one, a request that ends well gives back a tenth, a second gives one.

    So when most of what is sent again fails again, that dries up before it brings down what is left.
    """

    def __init__(self, clock: Clock, *, capacity: float = _CAPACITY) -> None:
        self._clock = clock
        self._capacity = capacity
        self._left = capacity
        self._filled_at = clock.now()

    @property
    def left(self) -> float:
        """How many repetitions there are left now."""
        now = self._clock.now()
        self._left = min(self._capacity, self._left + _PER_SECOND * (now - self._filled_at))
        self._filled_at = now
        return self._left

    def take(self) -> bool:
        """Take one; False, with nothing taken, when less than one is left."""
        if self.left < 1:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """Note a request that ended well."""
        self._left = min(self._capacity, self._left + _GIVEN_BACK)


MAX_MOVES = 3
MAX_PLANNED_MOVES = 32  # away from engines that were told to stop: every repetition has a limit
MAX_HELD = 256
QUARANTINED = "QUARANTINED"
RETRY_BUDGET_EMPTY = "RETRY_BUDGET_EMPTY"
_MAX_JITTER_S = 0.1
_PROBATION_S = 2.0


@dataclass(frozen=True, slots=True)
class Move:
    """One change of engines, as it is told: `origin` is the address of the engine that was left."""

    cause: LossKind
    origin: str
    target: str


@dataclass(frozen=True, slots=True)
class EngineRequirements:
    """What a request needs of an engine. With `is_exact` only the very same model will do."""

    model: ServedModel
    routing: RoutingRequest
    is_exact: bool = False


class Failover:
    """Finds engines for requests without one, in an order that lets few engines die of the same request.

    Whoever is told of a change of engines calls `engines_changed`. A request waits for the directory's
    reconnect window at most after it was lost, or after the last engine that could take it was. A suspect
    without output for `probation_s` is slow for another reason, and the others do not wait for it any more.
    """

    def __init__(
        self, directory: Directory, clock: Clock, chance: random.Random, *, probation_s: float = _PROBATION_S
    ) -> None:
        self.probation_s = probation_s
        self.clock = clock
        self.directory = directory
        self.budget = RetryBudget(clock)
        self.suspects = PoisonQuarantine()
        self.num_moved = 0
        self.num_quarantined = 0
        self.is_closed = False
        self._chance = chance
        self._waiting: dict[Suspect, Migration] = {}
        self._num_new = 0
        self._dispatching: asyncio.Handle | None = None

    @property
    def num_held(self) -> int:
        """Requests that wait for an engine."""
        return len(self._waiting)

    def engines_changed(self) -> None:
        """Look whether one of those that wait has an engine now."""
        for migration in self._waiting.values():
            migration.forgive()
        if self._waiting and self._dispatching is None:
            # Behind what is being done, which may be in the midst of losing or registering requests.
            self._dispatching = asyncio.get_running_loop().call_soon(self._dispatch)

    def close(self) -> None:
        """Send nothing on any more: what loses its engine from here on ends."""
        self.is_closed = True
        for migration in list(self._waiting.values()):
            migration.give_up()

    def jitter_s(self, suspect: Suspect) -> float:
        """How long a request that was lost waits first, so that not all come at once.

        Suspects that go in groups come before those that go alone, which have to wait for them.
        """
        if suspect.turn:
            return (suspect.turn - 1 + self._chance.random()) * _MAX_JITTER_S / 2
        return self._chance.random() * _MAX_JITTER_S

    def add(self, migration: Migration) -> None:
        """Let a request wait for its turn. Raises ResourceExhausted for one too many that is new."""
        if migration.is_new:
            if self._num_new >= MAX_HELD:
                raise ResourceExhausted(
                    f"{self._num_new} requests wait for an engine already, the limit is {MAX_HELD}",
                    reason="QUEUE_FULL",
                    retry_after_ms=RETRY_AFTER_MS,
                )
            self._num_new += 1
        self._waiting[migration.suspect] = migration
        self.engines_changed()

    def remove(self, migration: Migration) -> None:
        """Let it wait no more; harmless when it does not."""
        if self._waiting.pop(migration.suspect, None) is not None:
            self._num_new -= migration.is_new

    def _dispatch(self) -> None:
        self._dispatching = None
        # What was not found once is not looked for again: hundreds may wait for the same.
        in_vain: set[tuple[object, ...]] = set()
        for suspect in in_order(self._waiting):
            migration = self._waiting.get(suspect)
            if migration is None or (suspect.turn, *migration.key) in in_vain:
                continue
            client = migration.find(self.suspects.may_go)
            if client is None:
                in_vain.add((suspect.turn, *migration.key))
            else:
                migration.go(client)
        self.suspects.settle()


class Migration:
    """One request's way from engine to engine.

    `send` is called with the engine to send it to, `fail` once with the error that it ends with instead,
    `on_move` after each move. After `end` nothing is called any more.
    """

    def __init__(
        self,
        failover: Failover,
        requirements: EngineRequirements,
        *,
        send: Callable[[EngineClient], None],
        fail: Callable[[ServiceError], None],
        on_move: Callable[[Move], None] = lambda move: None,
        remaining_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.suspect = Suspect()
        self.num_attempts = 0  # how often it was sent
        self.client: EngineClient | None = None  # where it is
        self._failover = failover
        self._requirements = requirements
        self._send = send
        self._fail = fail
        self._on_move = on_move
        self._remaining_s = remaining_s
        self._num_moves = self._num_planned_moves = 0
        self._origin: EngineClient | None = None
        self._cause = LossKind.REFUSED
        self._error: ServiceError = Unavailable("not sent yet")
        self._refused_by: set[EngineClient] = set()
        self._wait_until = 0.0
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_new(self) -> bool:
        """True until it was sent for the first time."""
        return not self.num_attempts

    @property
    def is_on_probation(self) -> bool:
        """Whether `end_probation` is to be called at its next output."""
        return self.suspect.probation is not None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for requests that the same engines could take."""
        requirements, origin = self._requirements, self._origin
        # What else is told for routing says which engine is better, not which would do.
        routing = requirements.routing
        needs = routing.data_parallel_rank, routing.num_requests, routing.has_embeds
        refused_by = frozenset(map(id, self._refused_by))
        return id(requirements.model), *needs, requirements.is_exact, id(origin), refused_by

    def start(self) -> None:
        """Send it for the first time, at once or when an engine is back that was lost a moment ago.

        Raises what `Directory.pick` does, and ResourceExhausted when too many wait.
        """
        failover, requirements = self._failover, self._requirements
        try:
            client = failover.directory.pick(requirements.model, requirements.routing)
        except Unavailable as error:
            expected_until = failover.directory.expected_until(requirements.model)
            if expected_until is None or failover.is_closed:
                raise
            self._error, self._wait_until = error, expected_until
            failover.add(self)
            self._wait()
            return
        self.go(client)

    def take_over(self, client: EngineClient, num_attempts: int) -> None:
        """Begin with a request that is in `client` already, sent by a frontend that is gone."""
        self.client, self.num_attempts = client, num_attempts

    def lose(self, cause: LossKind, error: ServiceError, *, has_begun: bool, had_output: bool) -> None:
        """Go on elsewhere: its engine is lost, or refuses it for now.

        `error` ends it when there is no way on. `has_begun`: there was output, of whatever engine;
        `had_output`: of this one.
        """
        client, self.client = self.client, None
        if self._is_over or client is None:
            return
        self._stop_timer()
        self._origin, self._cause, self._error = client, cause, error
        self._requirements = EngineRequirements(
            self._requirements.model if client.model is None else client.model,
            self._requirements.routing,
            is_exact=has_begun,
        )
        failover = self._failover
        if failover.suspects.lose(self.suspect, client.address, cause, had_output=had_output):
            self._quarantine()
        elif failover.is_closed or not self._may_move():
            self._end_with(error)
        elif cause is LossKind.REFUSED:
            self._refused_by.add(client)
            self._go_on()
        else:
            self._go_on(failover.jitter_s(self.suspect))

    def end_probation(self) -> None:
        """Note output from the engine where it is: it is no suspect any more."""
        self._stop_timer()
        self._failover.suspects.clear(self.suspect)
        self._failover.engines_changed()

    def end(self, *, is_well: bool) -> None:
        """Forget it: it has ended, well or not."""
        if self._is_over:
            return
        self._is_over = True
        self.client = None
        # Whoever is called holds this object, and neither is to wait for a full collection.
        self._send = self._fail = self._on_move = _do_nothing
        self._stop_timer()
        self._failover.remove(self)
        self._failover.suspects.clear(self.suspect)
        if is_well:
            self._failover.budget.give_back()
        # It may have left room in an engine that is full, and its place to the next suspect.
        self._failover.engines_changed()

    def find(self, may_go: Callable[[Suspect, str], bool]) -> EngineClient | None:
        """The engine that it could be sent to now, one other than it was lost by if there is one."""

        def is_allowed(client: EngineClient) -> bool:
            return client not in self._refused_by and may_go(self.suspect, client.address)

        origin = self._origin
        if origin is not None:
            other = self._pick(lambda client: client is not origin and is_allowed(client))
            if other is not None:
                return other
        return self._pick(is_allowed)

    def go(self, client: EngineClient) -> None:
        """Send it to `client`, which may take it."""
        failover = self._failover
        self._stop_timer()
        failover.remove(self)
        self.client = client
        self.num_attempts += 1
        if failover.suspects.send(self.suspect, client.address):
            self._timer = asyncio.get_running_loop().call_later(failover.probation_s, self._pass_over)
        try:
            self._send(client)
        except ServiceError as error:
            self._end_with(error)
            return
        if self._origin is not None:
            failover.num_moved += 1
            self._on_move(Move(self._cause, self._origin.address, client.address))

    def give_up(self) -> None:
        """End the wait: send it where it would have had to wait for its turn, or end it."""
        client = None if self._failover.is_closed else self.find(lambda suspect, address: True)
        if client is not None:
            self.go(client)
        else:
            self._end_with(self._error)

    def forgive(self) -> None:
        """Forget that engines refused it which have stopped to be ready: they may be back as others."""
        if self._refused_by:
            ready = self._failover.directory.ready_for(self._requirements.model)
            self._refused_by.intersection_update(ready)

    def _pick(self, is_allowed: Callable[[EngineClient], bool]) -> EngineClient | None:
        requirements = self._requirements
        try:
            return self._failover.directory.pick(
                requirements.model,
                requirements.routing,
                is_exact=requirements.is_exact,
                is_allowed=is_allowed,
            )
        except ServiceError:
            # What an engine lacks just now it may have before the wait is over.
            return None

    def _may_move(self) -> bool:
        if self._cause is LossKind.LEFT:
            return self._num_planned_moves < MAX_PLANNED_MOVES
        return self._num_moves < MAX_MOVES

    def _go_on(self, delay_s: float = 0.0) -> None:
        failover = self._failover
        if self._cause is LossKind.LEFT:
            # That an engine is told to stop says nothing against the others, nor against the request.
            self._num_planned_moves += 1
        elif failover.budget.take():
            self._num_moves += 1
        else:
            self._end_with(
                Unavailable(
                    f"too many requests were sent again of late: {self._error.message}",
                    reason=RETRY_BUDGET_EMPTY,
                    retry_after_ms=RETRY_AFTER_MS,
                )
            )
            return
        self._wait_until = failover.clock.now() + failover.directory.reconnect_window_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._join)

    def _join(self) -> None:
        self._timer = None
        if self._failover.is_closed:
            self._end_with(self._error)
            return
        if self._cause is LossKind.REFUSED and self._is_refused_by_all():
            # They are not about to go: to wait for others says nothing that the refusal does not.
            self._end_with(self._error)
            return
        self._failover.add(self)
        self._wait()

    def _wait(self) -> None:
        remaining_s = self._remaining_s()
        wait_s = self._wait_until - self._failover.clock.now()
        if remaining_s is not None:
            wait_s = min(wait_s, remaining_s)
        self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), self.give_up)

    def _is_refused_by_all(self) -> bool:
        self.forgive()
        requirements = self._requirements
        ready = self._failover.directory.ready_for(
            requirements.model, is_exact=requirements.is_exact, has_embeds=requirements.routing.has_embeds
        )
        return bool(ready) and self._refused_by.issuperset(ready)

    def _pass_over(self) -> None:
        self._timer = None
        probation_s = self._failover.probation_s
        if self.client is not None and self.client.step_age_s > probation_s / 2:
            # The engine may be about to hang, by this very suspect: then the others must not be there.
            self._timer = asyncio.get_running_loop().call_later(probation_s / 2, self._pass_over)
            return
        self._failover.suspects.pass_over(self.suspect)
        self._failover.engines_changed()

    def _quarantine(self) -> None:
        self._failover.num_quarantined += 1
        self._end_with(
            Internal(
                f"{self.suspect.num_deaths} engines went down with this request: it is not sent to another",
                reason=QUARANTINED,
            )
        )

    def _end_with(self, error: ServiceError) -> None:
        fail = self._fail
        self.end(is_well=False)
        fail(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _do_nothing(*_: object) -> None:
    pass
