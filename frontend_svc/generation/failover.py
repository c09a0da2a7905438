"""Failover: moves requests that lost their engine, and holds those without one; limits retries and waits.

Uses only callbacks and timers: no task runs for a waiting request, and ending it frees everything at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from frontend_svc.engines.connection.client import EngineClient
from frontend_svc.engines.directory import Directory
from frontend_svc.engines.routing.engine_info import RoutingRequest
from frontend_svc.generation.poison import Content, PoisonRecord, ProbationLocks, quarantined
from frontend_svc.generation.suspects import PoisonQuarantine, Suspect, Turn, in_order
from frontend_svc.output.loss import RETRY_AFTER_MS, Loss, LossKind, refusal_of_begun
from frontend_svc.text.model import ServedModel
from triptych_kit.clock import Clock
from triptych_kit.errors import ResourceExhausted, ServiceError, Unavailable
from triptych_kit.telemetry.metrics import Counts

logger = logging.getLogger(__name__)

_CAPACITY = 1024.0
_GIVEN_BACK = 0.1
_PER_SECOND = 1.0


class RetryBudget:
    """Token bucket of retries: starts full; a retry takes one, a success adds a tenth, each second adds one.

    If most retries fail again, the budget is used up before they overload the remaining engines.
    """

    def __init__(self, clock: Clock, *, capacity: float = _CAPACITY) -> None:
        self._clock = clock
        self._capacity = capacity
        self._left = capacity
        self._filled_at = clock.now()

    @property
    def left(self) -> float:
        """Retries that are left now."""
        now = self._clock.now()
        self._left = min(self._capacity, self._left + _PER_SECOND * (now - self._filled_at))
        self._filled_at = now
        return self._left

    def take(self) -> bool:
        """Take one; returns False, and takes nothing, if less than one is left."""
        if self.left < 1:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """Add a tenth for a request that succeeded."""
        self._left = min(self._capacity, self._left + _GIVEN_BACK)


MAX_MOVES = 3
MAX_PLANNED_MOVES = 32  # away from draining engines: every kind of retry has a limit
MAX_HELD = 256
RETRY_BUDGET_EMPTY = "RETRY_BUDGET_EMPTY"
_MAX_JITTER_S = 0.1
_PROBATION_S = 2.0
# For how long a new request waits for a suspect that has the only engine for itself.
_HOLD_S = 4.0
# How often a suspect waits for its turn for a reconnect window, while there are engines.
_MAX_WAITS = 6
# How soon waiting suspects try again without a change of an engine: time passes, and other processes finish.
_RETRY_S = 0.05
# When all processes of the host have noticed the death of an engine.
_NOTICED_S = 3.0
# Requests of ended clients that their engines may die of still.
_MAX_LEFT = 4096


@dataclass(frozen=True, slots=True)
class Move:
    """A move from the engine with the id `origin` to the one with the id `target`."""

    cause: LossKind
    origin: str
    target: str


@dataclass(frozen=True, slots=True)
class EngineRequirements:
    """Requirements of a request. `is_exact`: only an engine with an identical model."""

    model: ServedModel
    routing: RoutingRequest
    is_exact: bool = False


class Failover:
    """Finds engines for requests without one, in an order that limits how many engines one request can crash.

    Call `engines_changed` after each change of an engine's state, and `lose_engine` before its requests are
    lost. A request waits at most the directory's reconnect window, counted from its loss or from the loss of
    the last engine that could take it, and a suspect some windows for its turn. A suspect without output for
    `probation_s` is assumed to be slow for another reason, and no longer blocks others. What is recorded of
    requests that were at deaths of engines is asked whenever one is sent: see `poison.py`.
    """

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        chance: random.Random,
        *,
        probation_s: float = _PROBATION_S,
        poison: PoisonRecord | None = None,
        locks: ProbationLocks | None = None,
    ) -> None:
        self.probation_s = probation_s
        self.clock = clock
        self.directory = directory
        self.budget = RetryBudget(clock)
        self.poison = poison or PoisonRecord()
        self.suspects = PoisonQuarantine(clock, self.poison, locks)
        self.moves = Counts({(kind.value,): 0 for kind in LossKind})  # by what was lost
        self.num_quarantined = 0
        self.is_closed = False
        self._chance = chance
        self._waiting: dict[Suspect, Migration] = {}
        self._num_new = 0
        self._num_left = 0
        self._dispatching: asyncio.Handle | None = None
        self._retrying: asyncio.TimerHandle | None = None

    @property
    def num_held(self) -> int:
        """Number of requests that wait for an engine."""
        return len(self._waiting)

    @property
    def num_moved(self) -> int:
        """Requests that were sent to another engine."""
        return int(sum(self.moves.values.values()))

    def engines_changed(self) -> None:
        """Try to send the waiting requests, soon."""
        for migration in self._waiting.values():
            migration.forgive()
        if self._waiting and self._dispatching is None:
            # After the current callback, which may be in the middle of losing or registering requests.
            self._dispatching = asyncio.get_running_loop().call_soon(self._dispatch)

    def close(self) -> None:
        """Move no more requests: those that wait or lose their engine from now on end."""
        self.is_closed = True
        if self._retrying is not None:
            self._retrying.cancel()
        for migration in list(self._waiting.values()):
            migration.give_up()

    def jitter_s(self, suspect: Suspect) -> float:
        """Random delay for a lost request, so that not all are sent at the same time.

        Suspects that go in groups have shorter delays than those that go alone, which wait for them.
        """
        if suspect.turn:
            return (suspect.turn - 1 + self._chance.random()) * _MAX_JITTER_S / 2
        return self._chance.random() * _MAX_JITTER_S

    def lose_engine(self, loss: Loss) -> None:
        """An engine has lost its requests; each is lost after this."""
        self.suspects.lose_engine(loss.address, is_dead=loss.kind is LossKind.DEATH)
        asyncio.get_running_loop().call_later(_NOTICED_S, self.suspects.release, loss.address)

    def leave(self, suspect: Suspect, limit_s: float) -> None:
        """A client has ended a request, of which its engine may die for `limit_s` still."""
        if suspect.engine is None or self._num_left >= _MAX_LEFT:
            self.suspects.remove(suspect)
            return
        self._num_left += 1
        self.suspects.leave(suspect)
        asyncio.get_running_loop().call_later(limit_s, self._forget_left, suspect)

    def _forget_left(self, suspect: Suspect) -> None:
        self._num_left -= 1
        self.suspects.remove(suspect)
        self.engines_changed()

    def add(self, migration: Migration) -> None:
        """Hold a request until an engine can take it. Raises ResourceExhausted for too many new ones."""
        if migration.is_new:
            # Suspects, which wait for each other, leave room for the others.
            limit = MAX_HELD // 2 if migration.suspect.turn else MAX_HELD
            if self._num_new >= limit:
                raise ResourceExhausted(
                    f"{self._num_new} requests wait for an engine already, the limit is {limit}",
                    reason="QUEUE_FULL",
                    retry_after_ms=RETRY_AFTER_MS,
                )
            self._num_new += 1
        self._waiting[migration.suspect] = migration
        self.engines_changed()

    def remove(self, migration: Migration) -> None:
        """Stop holding a request. Idempotent."""
        if self._waiting.pop(migration.suspect, None) is not None:
            self._num_new -= migration.is_new
            if not self._waiting:
                self.suspects.settle()

    def _dispatch(self) -> None:
        self._dispatching, self.suspects.is_locked_out = None, False
        # A search that failed is not repeated for equal requests: hundreds may wait for the same engine.
        in_vain: set[tuple[object, ...]] = set()
        for suspect in in_order(self._waiting):
            migration = self._waiting.get(suspect)
            if migration is None or (key := migration.key) in in_vain:
                continue
            client = migration.find()
            if client is None or not migration.go(client):
                in_vain.add(key)
        self.suspects.settle()
        is_in_turn = any(suspect.turn for suspect in self._waiting) or self.suspects.is_locked_out
        if is_in_turn and self._retrying is None and not self.is_closed:
            self._retrying = asyncio.get_running_loop().call_later(_RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retrying = None
        self.engines_changed()


class MovableRequest(Protocol):
    """A request, or a sampling group, that a `Migration` sends to one engine at a time. Does not know it."""

    @property
    def has_begun(self) -> bool:
        """Whether any engine has produced output for it."""

    @property
    def kept_by(self) -> EngineClient | None:
        """The engine that has most of it already; None: none has."""

    def send(self, client: EngineClient, attempt: int, on_output: Callable[[], None] | None) -> None:
        """Send it to `client`'s engine; `on_output` is called once, at its next output."""

    def withdraw(self, client: EngineClient) -> None:
        """Abort what is left of it in an engine that has rejected it, so that it moves as a whole."""

    def on_move(self, move: Move) -> None: ...

    def fail(self, error: ServiceError) -> None:
        """End it with `error`; called at most once."""

    def content(self) -> Content:
        """What it is recorded by if it crashes engines."""

    def remaining_s(self) -> float | None:
        """Time to its deadline."""


class Migration:
    """Sends a request to an engine, and to another if that one is lost. Calls nothing of it after `end`."""

    def __init__(self, failover: Failover, requirements: EngineRequirements, request: MovableRequest) -> None:
        self.suspect = Suspect(request.content())
        self.num_attempts = 0  # how often it was sent
        self.client: EngineClient | None = None  # of the engine that has it
        self._failover = failover
        self._requirements = requirements
        self._request = request
        self._num_moves = self._num_planned_moves = self._num_waits = 0
        self._origin: EngineClient | None = None
        self._cause = LossKind.REFUSED
        self._error: ServiceError = Unavailable("not sent yet")
        self._refused_by: set[EngineClient] = set()
        self._wait_until = 0.0
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_new(self) -> bool:
        """True until it is sent for the first time."""
        return not self.num_attempts

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for requests that the same engines can take now."""
        requirements, origin, suspect = self._requirements, self._origin, self.suspect
        # The other routing fields only express a preference among the engines that can take it.
        routing = requirements.routing
        needs = routing.data_parallel_rank, routing.num_requests, routing.needs
        refused_by = frozenset(map(id, self._refused_by))
        turn = suspect.turn, suspect.owner if suspect.turn is Turn.ALONE else ""
        return id(requirements.model), *needs, requirements.is_exact, id(origin), refused_by, *turn

    def start(self) -> None:
        """Send it for the first time, at once or when it is possible.

        Raises the errors of `Directory.pick`, Internal if it has crashed engines before or its account has,
        and ResourceExhausted if too many requests wait.
        """
        failover, requirements = self._failover, self._requirements
        self._check_record()
        try:
            client = self._keeper() or failover.directory.pick(requirements.model, requirements.routing)
        except Unavailable as error:
            expected_until = failover.directory.expected_until(requirements.model)
            if expected_until is None or failover.is_closed:
                raise
            self._hold(error, expected_until)
            return
        if self._is_kept_from_last() or not self._may_go(client):
            other = self.find()
            if other is None or not self._send(other):
                self._hold_for_turn()
        elif not self._send(client):
            self._hold_for_turn()

    def take_over(self, client: EngineClient, num_attempts: int) -> None:
        """Start with a request that another frontend has sent to the engine of `client`."""
        self.client, self.num_attempts = client, num_attempts
        suspects, yields_at = self._failover.suspects, self._failover.clock.now() + client.step_limit_s
        suspects.take_over(self.suspect, client.address, yields_at=yields_at)

    def lose(self, cause: LossKind, error: ServiceError) -> None:
        """Move it to another engine: its engine is lost, or has rejected it.

        `error` ends it if it cannot move. Each output of a group calls it: the first call moves all of them.
        """
        client, self.client = self.client, None
        if self._is_over or client is None:
            return
        self._stop_timer()
        has_begun = self._request.has_begun
        if cause is LossKind.REFUSED:
            self._request.withdraw(client)
            if has_begun:
                error = refusal_of_begun(client.address, error)
        self._origin, self._cause, self._error = client, cause, error
        self._requirements = EngineRequirements(
            self._requirements.model if client.model is None else client.model,
            self._requirements.routing,
            is_exact=has_begun,
        )
        failover, suspect = self._failover, self.suspect
        failover.suspects.remove(suspect)
        if cause is LossKind.DEATH and suspect.turn is Turn.AT_ONCE:
            # It had output there: it was not judged with the engine.
            suspect.turn = Turn.IN_GROUP
        if suspect.incident_id:
            self._quarantine()
        elif failover.is_closed or not self._may_move():
            self._end_with(error)
        elif cause is LossKind.REFUSED:
            self._refused_by.add(client)
            self._go_on()
        else:
            self._go_on(failover.jitter_s(suspect))

    def end_probation(self) -> None:
        """Its engine has produced output for it, so it is no suspect any more."""
        self._stop_timer()
        self._failover.suspects.clear(self.suspect)
        self._failover.engines_changed()

    def end(self, *, is_well: bool) -> EngineClient | None:
        """The request has ended; `is_well`: successfully. Returns the client of the engine that has it."""
        if self._is_over:
            return None
        failover, client = self._failover, self.client
        if is_well:
            failover.budget.give_back()
            failover.poison.innocent.add(self.suspect.content)
            failover.suspects.clear(self.suspect)
        elif client is not None:
            failover.leave(self.suspect, client.step_limit_s)
        self._end()
        return client

    def _end(self) -> None:
        self._is_over, self.client = True, None
        self._stop_timer()
        self._failover.remove(self)
        # Its engine may have room again, and the next suspect may go there.
        self._failover.engines_changed()

    def find(self) -> EngineClient | None:
        """An engine that it can be sent to now, preferably another than the one that lost it."""
        if self._is_kept_from_last():
            return None

        def is_allowed(client: EngineClient) -> bool:
            return client not in self._refused_by and self._may_go(client)

        origin = self._origin
        client = None
        if origin is not None:
            client = self._pick(lambda client: client is not origin and is_allowed(client))
        client = client or self._pick(is_allowed)
        if client is None and self.suspect.turn is Turn.ALONE:
            self._failover.suspects.reserve(self.suspect, self._ready())
        return client

    def go(self, client: EngineClient) -> bool:
        """Send it to `client` after a wait; False if it may not be sent there after all."""
        turn = self.suspect.turn
        try:
            self._check_record()
        except ServiceError as error:
            self._end_with(error)
            return True
        return self.suspect.turn is turn and self._send(client)

    def give_up(self) -> None:
        """End the wait, and with it the request where waiting longer cannot help."""
        until = self._longer_wait()
        if until is None:
            self._end_with(self._error)
            return
        self._num_waits += 1
        self._wait_until = until
        self._wait()

    def forgive(self) -> None:
        """Forget rejections of engines that are not ready any more: they may come back in another state."""
        if self._refused_by:
            ready = self._failover.directory.ready_for(self._requirements.model)
            self._refused_by.intersection_update(ready)

    def _keeper(self) -> EngineClient | None:
        """The ready engine that has most of it."""
        client, requirements = self._request.kept_by, self._requirements
        if client is None:
            return None
        ready = self._failover.directory.ready_for(requirements.model, needs=requirements.routing.needs)
        return client if client in ready else None

    def _longer_wait(self) -> float | None:
        """Until when to wait once more: for an engine that is expected back, or for the turn of a suspect."""
        failover, directory = self._failover, self._failover.directory
        remaining_s = self._request.remaining_s()
        is_late = remaining_s is not None and remaining_s <= 0
        if failover.is_closed or is_late or self._num_waits >= _MAX_WAITS:
            return None
        if self.is_new:
            return directory.expected_until(self._requirements.model)
        if self.suspect.turn and self._ready():
            return failover.clock.now() + directory.reconnect_window_s
        return None

    def _send(self, client: EngineClient) -> bool:
        failover = self._failover
        yields_at = failover.clock.now() + client.step_limit_s
        if not failover.suspects.send(self.suspect, client.address, yields_at=yields_at):
            return False
        self._stop_timer()
        failover.remove(self)
        self.client = client
        self.num_attempts += 1
        if self.suspect.turn:
            self._timer = asyncio.get_running_loop().call_later(failover.probation_s, self._pass_over)
        try:
            self._request.send(client, self.num_attempts - 1, self.end_probation)
        except ServiceError as error:
            failover.suspects.remove(self.suspect)
            self._end_with(error)
            return True
        if self._origin is not None:
            failover.moves.add(self._cause.value)
            self._request.on_move(Move(self._cause, self._origin.engine_id, client.engine_id))
        return True

    def _may_go(self, client: EngineClient) -> bool:
        return self._failover.suspects.may_go(self.suspect, client.address, self._ready)

    def _ready(self) -> list[str]:
        """The addresses of the engines that can take it."""
        requirements = self._requirements
        ready = self._failover.directory.ready_for(
            requirements.model, is_exact=requirements.is_exact, needs=requirements.routing.needs
        )
        return [client.address for client in ready]

    def _is_kept_from_last(self) -> bool:
        """Whether it is a suspect, and only one engine is left of several that were ready lately."""
        if self.suspect.turn is not Turn.ALONE:
            return False
        model, directory = self._requirements.model, self._failover.directory
        return len(directory.ready_for(model)) == 1 and directory.num_recent(model) > 1

    def _check_record(self) -> None:
        """Have it run alone if it may crash engines. Raises Internal if it is known to."""
        suspect = self.suspect
        is_unknown = suspect.turn is Turn.ALONE or not self._request.has_begun
        if self._failover.poison.check(suspect.content, is_unknown=is_unknown):
            suspect.turn = Turn.ALONE

    def _hold_for_turn(self) -> None:
        """Hold a new request that the ready engines must not get now."""
        failover = self._failover
        error = Unavailable(
            "a request that may crash engines runs alone",
            reason="ENGINES_BUSY",
            retry_after_ms=RETRY_AFTER_MS,
        )
        if failover.is_closed:
            raise error
        is_suspect = self.suspect.turn is Turn.ALONE
        wait_s = failover.directory.reconnect_window_s if is_suspect else _HOLD_S
        self._hold(error, failover.clock.now() + wait_s)

    def _hold(self, error: ServiceError, until: float) -> None:
        """Wait for an engine; `error` ends it where there is none then."""
        self._error, self._wait_until = error, until
        self._failover.add(self)
        self._wait()

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
            # An engine may be able to take it before the wait is over.
            return None

    def _may_move(self) -> bool:
        if self._cause is LossKind.LEFT:
            return self._num_planned_moves < MAX_PLANNED_MOVES
        return self._num_moves < MAX_MOVES

    def _go_on(self, delay_s: float = 0.0) -> None:
        failover = self._failover
        if self._cause is LossKind.LEFT:
            # A drain of an engine is no sign of trouble with other engines or with the request.
            self._num_planned_moves += 1
        elif failover.budget.take():
            self._num_moves += 1
        else:
            self._end_with(
                Unavailable(
                    f"the retry budget is exhausted: {self._error.message}",
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
            # These engines stay ready, so waiting would not help: report their rejection now.
            self._end_with(self._error)
            return
        self._failover.add(self)
        self._wait()

    def _wait(self) -> None:
        remaining_s = self._request.remaining_s()
        wait_s = self._wait_until - self._failover.clock.now()
        if remaining_s is not None:
            wait_s = min(wait_s, remaining_s)
        self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), self.give_up)

    def _is_refused_by_all(self) -> bool:
        self.forgive()
        requirements = self._requirements
        ready = self._failover.directory.ready_for(
            requirements.model, is_exact=requirements.is_exact, needs=requirements.routing.needs
        )
        return bool(ready) and self._refused_by.issuperset(ready)

    def _pass_over(self) -> None:
        self._timer = None
        probation_s = self._failover.probation_s
        if self.client is not None and self.client.step_age_s > probation_s / 2:
            # The engine may hang because of this suspect: other suspects must not be sent there.
            self._timer = asyncio.get_running_loop().call_later(probation_s / 2, self._pass_over)
            return
        self._failover.suspects.pass_over(self.suspect)
        self._failover.engines_changed()

    def _quarantine(self) -> None:
        incident_id = self.suspect.incident_id
        self._failover.num_quarantined += 1
        logger.error("request quarantined", extra={"incident_id": incident_id})
        message = "engines failed while they ran it: this request is not sent again"
        self._end_with(quarantined(message, incident_id))

    def _end_with(self, error: ServiceError) -> None:
        self._end()
        self._request.fail(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
