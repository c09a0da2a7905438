"""The engine as the asyncio side sees it: state, load progress, the loaded core, calls into its thread.

Owned by the event loop; the engine thread reaches it only through callbacks posted to the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from engine_svc.admin.lifecycle import EngineState, Lifecycle
from engine_svc.convert.feature import WireFeatures
from engine_svc.core.artifacts import Artifact
from engine_svc.core.facts import EngineFacts, EngineIdentity, LoadProgress
from engine_svc.loop.answer import give
from engine_svc.loop.mailbox import Call, Inbox, KVEventLog, LoopStats, StatsSnapshot
from engine_svc.loop.pause import RunState
from engine_svc.tensors.source import TensorReceiver
from triptych.engine.v1 import utility_pb2
from triptych_kit.clock import Clock, StallTimer
from triptych_kit.errors import DeadlineExceeded, Internal, ServiceError, Unavailable, Unimplemented
from triptych_kit.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from engine_svc.core.request import Request
    from engine_svc.data_parallel.driver import LockstepDriver, RankStatus
    from engine_svc.loop.controls import EngineControls
    from engine_svc.scheduler.watch import SchedulerWatch


logger = logging.getLogger(__name__)

T = TypeVar("T")

HEARTBEAT_S = 0.5  # between two heartbeats to frontends
# How often a waiting call checks whether the engine has ended.
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class LoadedCore:
    """The parts of a loaded engine for the asyncio side. Both functions are thread-safe."""

    facts: EngineFacts
    refusal: Callable[[Request], str | None]  # why a request can never be served, or None
    prepare: Callable[[Request], None]  # work that need not be done in the loop: block hashes
    controls: EngineControls | None = (
        None  # used on the engine thread; None: the engine takes no utility calls
    )
    lockstep: LockstepDriver | None = None  # None: it does not step together with other engines
    rank_ids: Sequence[int] = ()  # process ids of the ranks
    num_device_bytes: Callable[[], int] = int  # memory in use
    watch: SchedulerWatch | None = None  # read on the engine thread; None: there is none


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine failed, and the exit code of its process."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class OptionInEffect:
    """One option of the engine's process, and the origin of its value."""

    name: str
    value: str
    origin: str


class Role(Enum):
    """Role of a caller. Derived from the listener that received the call, never from its content."""

    FRONTEND = "frontend"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class UtilityCall:
    """A call that an engine serves: its field in the proto's oneof, who may make it, and its handler.

    may_wait: it may wait until a resume call arrives, which therefore must not wait for it.
    """

    name: str
    role: Role
    handler: Callable[[CallContext, utility_pb2.UtilityCall], Awaitable[utility_pb2.UtilityResult]]
    may_wait: bool = False


@dataclass(slots=True, eq=False)
class ServedEngine:
    """One engine as its sessions, its admin service and its membership see it."""

    identity: EngineIdentity
    artifacts: tuple[Artifact, ...]
    lifecycle: Lifecycle
    inbox: Inbox
    stats_snapshot: StatsSnapshot
    clock: Clock
    drain_deadline_s: float = 0.0
    replay_window_s: float = 5.0  # how long a session without a stream is kept; 0: it ends with its stream
    kv_event_log: KVEventLog | None = None  # None: KV cache events are disabled
    features: WireFeatures = field(default_factory=WireFeatures)
    tensors: TensorReceiver = field(default_factory=TensorReceiver)
    metrics: Metrics = field(default_factory=lambda: Metrics("engine"))
    progress: LoadProgress = field(default_factory=LoadProgress)
    core: LoadedCore | None = None
    failure: Failure | None = None
    options: tuple[OptionInEffect, ...] = ()  # ordered by name
    utilities: Mapping[str, UtilityCall] = field(default_factory=dict)  # the calls that it serves
    shares_experts: bool = False  # shares experts with other engines and therefore steps together with them
    is_member: bool = False  # whether it is registered at a coordinator and the stream to it is open
    num_fenced_commands: int = 0  # commands refused because a newer coordinator has replaced the sender
    on_rank_status: list[Callable[[RankStatus], None]] = field(default_factory=list)
    on_member: list[Callable[[bool], None]] = field(default_factory=list)  # called when `is_member` changes
    step_timer: StallTimer = field(default_factory=lambda: StallTimer(HEARTBEAT_S))

    @property
    def run_state(self) -> RunState:
        """Whether the engine runs its requests, or is paused or asleep at an operator's request."""
        controls = None if self.core is None else self.core.controls
        return RunState.RUNNING if controls is None else controls.pause_controller.state

    def step_age_s(self, stats: LoopStats) -> float:
        """How long the step or call of `stats` has been running; 0 while neither runs.

        Called for each heartbeat, and counts from one to the next: not while this process is stopped, as the
        step does not run then either.
        """
        step, started_at = (stats.step_number, stats.step_started_at), stats.step_started_at
        age_s = self.step_timer.look(step, self.clock.now(), started_at)
        return 0.0 if started_at is None else age_s

    def become_ready(self, core: LoadedCore) -> None:
        """Record that the model is loaded. Has no effect if the process is already ending.

        An engine that steps together with others becomes READY when their group has first formed.
        """
        if self.lifecycle.state is not EngineState.LOADING:
            return
        self.core = core
        if core.lockstep is None:
            self.lifecycle.move_to(EngineState.READY)
            return
        identity = self.identity
        logger.info(
            "loaded, waiting for the coordinator to form the group with the other ranks",
            extra={"group": identity.dp_group, "rank": identity.dp_rank, "size": identity.dp_size},
        )
        self.progress = LoadProgress("group", 0, identity.dp_size)
        self.note_rank_status(core.lockstep.rank_status)

    def note_rank_status(self, rank_status: RankStatus) -> None:
        """Record a change of this engine's status in its data-parallel group, and notify the listeners."""
        if rank_status.generation and self.core is not None and self.lifecycle.state is EngineState.LOADING:
            self.lifecycle.move_to(EngineState.READY)
        for listener in self.on_rank_status:
            listener(rank_status)

    @property
    def is_awaited(self) -> bool:
        """Whether other ranks step together with this engine, and a coordinator can release it from them."""
        driver = None if self.core is None else self.core.lockstep
        return self.is_member and driver is not None and driver.rank_status.is_awaited

    def note_member(self, is_member: bool) -> None:
        """Record whether the engine is registered at a coordinator, and notify the listeners of a change."""
        if is_member == self.is_member:
            return
        self.is_member = is_member
        for listener in self.on_member:
            listener(is_member)

    def renew(self, facts: EngineFacts) -> None:
        """Replace the facts after a weight update; READY is then announced again."""
        if self.core is not None and self.lifecycle.state is EngineState.READY and facts != self.core.facts:
            self.core = replace(self.core, facts=facts)
            self.announce_again()

    def announce_again(self) -> None:
        """Send frontends READY again, with what it announces now. Where the engine is not ready, they get
        that with the next READY, if any. Called on the event loop.
        """
        if self.lifecycle.state is EngineState.READY:
            self.lifecycle.repeat()

    def fail(self, failure: Failure) -> None:
        """Record that loading or the engine loop failed."""
        if not self.lifecycle.has_ended:
            self.failure = failure
            self.lifecycle.move_to(EngineState.FAILED)


@dataclass(frozen=True, slots=True)
class CallContext:
    """Access of a handler to the engine, and to its thread until the caller's timeout."""

    engine: ServedEngine
    timeout_s: float

    @property
    def core(self) -> LoadedCore:
        core = self.engine.core
        if core is None:
            raise Unavailable("engine is loading", reason="ENGINE_LOADING")
        return core

    @property
    def controls(self) -> EngineControls:
        controls = self.core.controls
        if controls is None:
            raise Unimplemented("this engine is stepped by its caller and takes no utility calls")
        return controls

    async def ask(self, work: Callable[[EngineControls], T]) -> T:
        """Run `work` on the engine thread and return its result."""
        return await self.deferred(lambda controls, answer: give(answer, lambda: work(controls)))

    async def deferred(self, work: Callable[[EngineControls, Future[T]], None]) -> T:
        """Start `work` on the engine thread and wait for the answer, which it may give later."""
        lifecycle, inbox = self.engine.lifecycle, self.engine.inbox
        if lifecycle.state is not EngineState.READY:
            raise Unavailable(f"engine is {lifecycle.state.value}", reason=f"ENGINE_{lifecycle.state.name}")
        controls = self.controls
        answer: Future[T] = Future()
        inbox.put(Call(lambda: controls.serve(lambda: work(controls, answer))))
        wrapped = asyncio.wrap_future(answer)
        until = asyncio.get_running_loop().time() + self.timeout_s
        try:
            while not answer.done() and not lifecycle.has_ended:
                left_s = until - asyncio.get_running_loop().time()
                if left_s <= 0:
                    break
                await asyncio.wait((wrapped,), timeout=min(left_s, _LOOK_S))
        finally:
            # A call that has not begun never will; one that waits for requests to end is dropped.
            if answer.cancel():
                inbox.put(Call(lambda: controls.serve(controls.pause_controller.drop_cancelled)))
            wrapped.cancel()
        return self._result_of(answer)

    def _result_of(self, answer: Future[T]) -> T:
        if self.engine.lifecycle.has_ended and (answer.cancelled() or not answer.done()):
            raise Unavailable("the engine has ended", reason="ENGINE_DEAD")
        if answer.cancelled():
            raise DeadlineExceeded(f"no answer within {self.timeout_s:g} s; nothing was changed")
        if not answer.done():
            raise DeadlineExceeded(
                f"no answer within {self.timeout_s:g} s; it has begun and will take effect"
            )
        error = answer.exception()
        if error is None:
            return answer.result()
        if isinstance(error, ServiceError):
            raise error
        logger.error("utility call failed", exc_info=error)
        raise Internal("internal error, see the engine's log")
