"""Failover: moves requests that lost their engine, and holds those without one; limits retries and waits.

Uses only callbacks and timers: no task runs for a waiting request, and ending it frees everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from frontend_svc.engines.connection.client import EngineClient
from frontend_svc.engines.directory import Directory
from frontend_svc.engines.routing.engine_info import RoutingRequest
from frontend_svc.generation.poison import Content, PoisonRecord, ProbationLocks, quarantined
from frontend_svc.generation.suspects import PoisonQuarantine, Suspect, Turn, in_order
from frontend_svc.output.loss import RETRY_AFTER_MS, LossKind, refusal_of_begun
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
# From so many deaths on, the last engine is kept from a suspect.
_MAX_DEATHS = 2
_MAX_UNCLEARED = 1024
_UNCLEARED_S = 600.0
# How soon a suspect tries an engine again on which another process of this host had suspects.
_LOCKED_OUT_S = 0.02


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

    Call `engines_changed` after each change of an engine's state. A request waits at most the directory's
    reconnect window, counted from its loss or from the loss of the last engine that could take it. A suspect
    without output for `probation_s` is assumed to be slow for another reason, and no longer blocks others.
    A request that has crashed engines is refused from then on, by its prompt; see `poison.py`. One that its
    client has ended while it was a likely cause stays one when it is sent again, and so are other prompts of
    its account that are not known to be innocent.
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
        self.suspects = PoisonQuarantine(locks)
        self.poison = poison or PoisonRecord()
        self.moves = Counts({(kind.value,): 0 for kind in LossKind})  # by what was lost
        self.num_quarantined = 0
        self.is_closed = False
        self._chance = chance
        self._waiting: dict[Suspect, Migration] = {}
        self._num_new = 0
        self._uncleared: OrderedDict[Content, float] = OrderedDict()  # until when they are suspects
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

    def is_suspicious(self, content_of_request: Callable[[], Content]) -> bool:
        """Whether a new request is to run alone. Its content is asked for only if any is to."""
        while self._uncleared and next(iter(self._uncleared.values())) <= self.clock.now():
            self._uncleared.popitem(last=False)
        if not self._uncleared:
            return False
        content = content_of_request()
        is_of_suspect = any(content.account == one.account for one in self._uncleared)
        return content in self._uncleared or (
            bool(content.account) and is_of_suspect and content not in self.poison.innocent
        )

    def note_uncleared(self, content: Content) -> None:
        """A likely cause of a death was ended by its client before it could be cleared."""
        self._uncleared.pop(content, None)
        self._uncleared[content] = self.clock.now() + _UNCLEARED_S
        if len(self._uncleared) > _MAX_UNCLEARED:
            self._uncleared.popitem(last=False)

    def note_innocent(self, content: Content) -> None:
        """A request was answered."""
        self._uncleared.pop(content, None)
        self.poison.innocent.add(content)

    def add(self, migration: Migration) -> None:
        """Hold a request until an engine can take it. Raises ResourceExhausted for too many new ones."""
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
        """Stop holding a request. Idempotent."""
        if self._waiting.pop(migration.suspect, None) is not None:
            self._num_new -= migration.is_new
        if not self._waiting:
            # Also for a new request that reserved an engine, and went to another at once.
            self.suspects.release_reserved()

    def _dispatch(self) -> None:
        self._dispatching, self.suspects.is_locked_out = None, False
        self.suspects.release_reserved()
        # A search that failed is not repeated for equal requests: hundreds may wait for the same engine.
        in_vain: set[tuple[object, ...]] = set()
        for suspect in in_order(self._waiting):
            migration = self._waiting.get(suspect)
            if migration is None or (suspect.turn, *migration.key) in in_vain:
                continue
            client = migration.find()
            if client is None:
                in_vain.add((suspect.turn, *migration.key))
            else:
                migration.go(client)
        self.suspects.settle()
        if self.suspects.is_locked_out and self._retrying is None and not self.is_closed:
            self._retrying = asyncio.get_running_loop().call_later(_LOCKED_OUT_S, self._retry)

    def _retry(self) -> None:
        self._retrying = None
        self.engines_changed()


class MovableRequest(Protocol):
    """A request, or a sampling group, that a `Migration` sends to one engine at a time. Does not know it."""

    @property
    def has_begun(self) -> bool:
        """Whether any engine has produced output for it."""

    @property
    def has_output_since_send(self) -> bool:
        """Whether the engine that it was sent to last has."""

    def send(self, client: EngineClient, attempt: int, on_output: Callable[[], None] | None) -> None:
        """Send it to `client`'s engine; `on_output` is called once, at the next output."""

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
        self.suspect = Suspect()
        self.num_attempts = 0  # how often it was sent
        self.client: EngineClient | None = None  # of the engine that has it
        self._failover = failover
        self._requirements = requirements
        self._request = request
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
        """True until it is sent for the first time."""
        return not self.num_attempts

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for requests that the same engines can take."""
        requirements, origin = self._requirements, self._origin
        # The other routing fields only express a preference among the engines that can take it.
        routing = requirements.routing
        needs = routing.data_parallel_rank, routing.num_requests, routing.needs
        refused_by = frozenset(map(id, self._refused_by))
        return id(requirements.model), *needs, requirements.is_exact, id(origin), refused_by

    def start(self) -> None:
        """Send it for the first time, at once or when a recently lost engine is back.

        Raises the errors of `Directory.pick`, Internal if it has crashed engines before or its account has,
        and ResourceExhausted if too many requests wait.
        """
        failover, requirements, content = self._failover, self._requirements, self._request.content
        failover.poison.check_prompt(content)
        failover.poison.check_account(content)
        if failover.is_suspicious(content):
            self.suspect.turn = Turn.ALONE
        try:
            client = failover.directory.pick(requirements.model, requirements.routing)
        except Unavailable as error:
            expected_until = failover.directory.expected_until(requirements.model)
            if expected_until is None or failover.is_closed:
                raise
            self._hold(error, expected_until)
            return
        if not self._may_go(client):
            other = self.find()
            if other is None and not failover.is_closed:
                why = Unavailable("a request that may crash engines runs alone", reason="ENGINES_BUSY")
                with contextlib.suppress(ResourceExhausted):
                    self._hold(why, failover.clock.now() + _HOLD_S)
                    return
            client = other or client
        self.go(client)

    def take_over(self, client: EngineClient, num_attempts: int) -> None:
        """Start with a request that another frontend has sent to the engine of `client`."""
        self.client, self.num_attempts = client, num_attempts

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
        failover = self._failover
        had_output = self._request.has_output_since_send or (
            self.suspect.turn is Turn.AT_ONCE and self._request.content() in failover.poison.innocent
        )
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
        """Its engine has produced output for it, so it is no suspect any more."""
        self._stop_timer()
        self._failover.suspects.clear(self.suspect)
        self._failover.engines_changed()

    def end(self, *, is_well: bool) -> EngineClient | None:
        """The request has ended; `is_well`: successfully. Returns the client of the engine that has it."""
        if self._is_over:
            return None
        if is_well:
            self._failover.budget.give_back()
            self._failover.note_innocent(self._request.content())
        elif self.suspect.turn is Turn.ALONE and self.suspect.num_deaths:
            self._failover.note_uncleared(self._request.content())
        return self._end()

    def _end(self) -> EngineClient | None:
        self._is_over = True
        client, self.client = self.client, None
        self._stop_timer()
        self._failover.remove(self)
        self._failover.suspects.clear(self.suspect)
        # Its engine may have room again, and the next suspect may go there.
        self._failover.engines_changed()
        return client

    def find(self, *, in_any_case: bool = False) -> EngineClient | None:
        """An engine that it can be sent to now, preferably another than the one that lost it.

        in_any_case: even one with other suspects.
        """
        if self._is_kept_from_last():
            return None

        def is_allowed(client: EngineClient) -> bool:
            return client not in self._refused_by and (in_any_case or self._may_go(client))

        origin = self._origin
        if origin is not None:
            other = self._pick(lambda client: client is not origin and is_allowed(client))
            if other is not None:
                return other
        return self._pick(is_allowed)

    def go(self, client: EngineClient) -> None:
        """Send it to `client`."""
        failover = self._failover
        self._stop_timer()
        failover.remove(self)
        self.client = client
        self.num_attempts += 1
        if failover.suspects.send(self.suspect, client.address):
            self._timer = asyncio.get_running_loop().call_later(failover.probation_s, self._pass_over)
        try:
            if self._origin is not None:
                self._check_again()
            self._request.send(client, self.num_attempts - 1, self.end_probation)
        except ServiceError as error:
            self._end_with(error)
            return
        if self._origin is not None:
            failover.moves.add(self._cause.value)
            self._request.on_move(Move(self._cause, self._origin.engine_id, client.engine_id))

    def give_up(self) -> None:
        """End the wait: send it even to an engine with other suspects, or end it if there is none."""
        client = None if self._failover.is_closed else self.find(in_any_case=True)
        if client is not None:
            self.go(client)
        else:
            self._end_with(self._error)

    def forgive(self) -> None:
        """Forget rejections of engines that are not ready any more: they may come back in another state."""
        if self._refused_by:
            ready = self._failover.directory.ready_for(self._requirements.model)
            self._refused_by.intersection_update(ready)

    def _may_go(self, client: EngineClient) -> bool:
        return self._failover.suspects.may_go(self.suspect, client.address, self._num_ready)

    def _num_ready(self) -> int:
        return len(self._failover.directory.ready_for(self._requirements.model))

    def _is_kept_from_last(self) -> bool:
        """Whether only one of several engines is left, and it may have crashed the others."""
        if self.suspect.turn is not Turn.ALONE or self.suspect.num_deaths < _MAX_DEATHS:
            return False
        return self._num_ready() == 1 and self._failover.directory.num_known > 1

    def _check_again(self) -> None:
        """Raise the error of a moved request that must not be sent: others were found meanwhile."""
        failover, content = self._failover, self._request.content
        failover.poison.check_prompt(content)
        if self.suspect.turn is Turn.ALONE:
            try:
                failover.poison.check_account(content)
            except ServiceError:
                raise self._error from None

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
        self._failover.num_quarantined += 1
        incident_id = self._failover.poison.add(self._request.content())
        logger.error("request quarantined", extra={"incident_id": incident_id})
        message = (
            f"{self.suspect.num_deaths} engines failed while they ran this request: it is not sent again"
        )
        self._end_with(quarantined(message, incident_id))

    def _end_with(self, error: ServiceError) -> None:
        self._end()
        self._request.fail(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
