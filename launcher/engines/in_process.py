"""An engine in this process that is stepped by the caller of `get_output`: no thread, no socket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine_svc.admin.served_engine import LoadedCore
from engine_svc.build.engine import build_engine, build_served_engine
from engine_svc.config import EngineConfig
from engine_svc.convert import messages
from engine_svc.core.facts import LoadProgress
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Abort, Add, Inbox, Outbox
from engine_svc.loop.step_output import StepOutput
from engine_svc.session.requests import MAX_INFLIGHT_ADDS
from engine_svc.session.session import MAX_OUTBOX_BYTES
from frontend_svc.engines.connection.columns import read_step
from launcher.engines.core_client import CoreOutput, EngineDead, no_rows
from service_kit.clock import Clock
from service_kit.errors import InvalidArgument, ResourceExhausted
from triptych.engine.v1 import add_pb2, engine_pb2

# Interval of attempts to step while requests wait and none can run.
_BLOCKED_WAIT_S = 0.001


@dataclass(frozen=True, slots=True)
class _InFlight:
    request_id: str
    stop_token_ids: frozenset[int]


class InProcessClient:
    """A client whose `get_output` steps the engine. Used by one thread."""

    def __init__(self, engine: Engine, core: LoadedCore, *, inbox: Inbox, clock: Clock) -> None:
        self._engine = engine
        self._core = core
        self._inbox = inbox
        self._clock = clock
        self._outbox = Outbox(max_bytes=MAX_OUTBOX_BYTES, wake=_ignore_wake)
        self._in_flight: dict[int, _InFlight] = {}
        self._handles = itertools.count(1)
        self._cause_of_death = ""

    @property
    def num_in_flight(self) -> int:
        """The number of requests whose last output has not been read."""
        return len(self._in_flight)

    def add(self, entry: add_pb2.AddEntry) -> int:
        """Queue a request; returns its handle. Raises the reason if it is invalid, or EngineDead."""
        self._ensure_alive()
        if len(self._in_flight) >= MAX_INFLIGHT_ADDS:
            raise ResourceExhausted(
                f"{len(self._in_flight)} requests are in flight, the limit is {MAX_INFLIGHT_ADDS}"
            )
        entry.handle = next(self._handles)
        now = self._clock.now()
        request = messages.to_request(entry, session_number=0, facts=self._core.facts, now=now)
        refusal = self._core.refusal(request)
        if refusal is not None:
            raise InvalidArgument(refusal, reason="NEVER_FITS")
        self._core.prepare(request)
        if not self._inbox.put(Add(request, self._outbox, entry.handle, messages.to_deadline(entry, now))):
            raise ResourceExhausted("the engine's inbox is full")
        self._in_flight[entry.handle] = _InFlight(
            request.request_id, frozenset(entry.sampling.stop_token_ids)
        )
        return entry.handle

    def abort(self, handles: Iterable[int], reason: engine_pb2.AbortReason) -> None:
        """Abort requests; their last outputs are returned as usual."""
        self._ensure_alive()
        for handle in handles:
            if handle in self._in_flight:
                self._inbox.put(Abort(self._in_flight[handle].request_id, messages.to_abort_cause(reason)))

    def get_output(self) -> CoreOutput:
        """Step until there is output; returns no rows if nothing is in flight.

        An error in a step is raised unchanged; the engine is dead after it.
        """
        self._ensure_alive()
        while True:
            has_stepped = self._turn()
            step = self._outbox.take()
            if step is not None:
                return self._output(step)
            if self._outbox.has_overflowed:
                raise ResourceExhausted("outputs were lost: more was left unread than the outbox takes")
            if not self._in_flight:
                return CoreOutput(no_rows())
            if not has_stepped:
                self._inbox.wait(_BLOCKED_WAIT_S)

    def close(self) -> None:
        """Drop all requests, and free the device."""
        if self._cause_of_death != "closed":
            self._cause_of_death = "closed"
            self._in_flight.clear()
            self._outbox.close()
            self._engine.close()

    def _turn(self) -> bool:
        # Set before the step: an exception in the middle of it leaves an unusable engine.
        self._cause_of_death = "a step was broken off"
        has_stepped = self._engine.turn()
        self._cause_of_death = ""
        return has_stepped

    def _output(self, step: StepOutput) -> CoreOutput:
        ended = [step.handles[finished.row] for finished in step.finished]
        stop_token_ids = {handle: self._in_flight[handle].stop_token_ids for handle in ended}
        columns = read_step(messages.to_step(step, stop_token_ids))
        for handle in ended:
            del self._in_flight[handle]
        return CoreOutput(columns)

    def _ensure_alive(self) -> None:
        if self._cause_of_death:
            raise EngineDead(self._cause_of_death)


def load_in_process(config: EngineConfig) -> InProcessClient:
    """Load the model of `config`. Raises ValueError or OSError with a readable message."""
    served = build_served_engine(config)
    engine, core = build_engine(config, served, progress=_ignore_progress, defer=_at_once)
    return InProcessClient(engine, core, inbox=served.inbox, clock=served.clock)


def _ignore_wake() -> None:
    """No wake-up is needed, as the reader steps itself."""


def _ignore_progress(progress: LoadProgress) -> None:
    """The caller waits without a display."""


def _at_once(call: Callable[[], None]) -> None:
    call()
