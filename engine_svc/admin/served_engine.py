"""What the I/O side knows of the engine it serves: state, progress, and once it is loaded, how to enter.

Owned by the event loop; the engine thread reaches it only through callbacks posted there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine_svc.admin.lifecycle import EngineState, Lifecycle
from engine_svc.admin.orphaned_requests import OrphanedRequests, Timer
from engine_svc.core.artifacts import Artifact
from engine_svc.core.facts import EngineFacts, EngineIdentity, LoadProgress
from engine_svc.core.request import Request
from engine_svc.loop.mailbox import Abort, Forget, Inbox, KVEventLog, StatsSnapshot
from engine_svc.loop.pause import RunState
from engine_svc.tensors.source import TensorReceiver
from service_kit.clock import Clock

if TYPE_CHECKING:
    from engine_svc.data_parallel.driver import LockstepDriver, RankStatus
    from engine_svc.loop.controls import EngineControls


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedCore:
    """What the I/O side may use of a loaded engine. Both functions may run beside the loop."""

    facts: EngineFacts
    refusal: Callable[[Request], str | None]  # why a request can never be served, or None
    prepare: Callable[[Request], None]  # work that need not be done in the loop: block hashes
    controls: EngineControls | None = (
        None  # for the engine thread; None: nobody pauses it or puts it to sleep
    )
    lockstep: LockstepDriver | None = None  # None: it steps alone
    rank_ids: Sequence[int] = ()  # processes that the model is divided over


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine ended, and what its process exits with."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class OptionInEffect:
    """One option of the engine's process, and where its value came from."""

    name: str
    value: str
    origin: str


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
    kv_event_log: KVEventLog | None = None  # None: nobody may follow the prefix cache
    tensors: TensorReceiver = field(default_factory=TensorReceiver)
    progress: LoadProgress = field(default_factory=LoadProgress)
    core: LoadedCore | None = None
    failure: Failure | None = None
    options: tuple[OptionInEffect, ...] = ()  # in order of their names
    shares_experts: bool = False  # with other engines, so that it steps together with them
    is_member: bool = False  # whether a coordinator has taken the registration and its session stands
    num_fenced_commands: int = 0  # of a coordinator that another one has taken the place of
    on_rank_status: list[Callable[[RankStatus], None]] = field(default_factory=list)
    on_member: list[Callable[[bool], None]] = field(default_factory=list)  # told of each change of it
    orphaned_requests: OrphanedRequests = field(init=False)  # requests that another frontend may take over

    def __post_init__(self) -> None:
        self.orphaned_requests = OrphanedRequests(give_up=self._give_up, call_later=_call_later)

    @property
    def run_state(self) -> RunState:
        """What the engine does with its requests, by an operator's wish."""
        controls = None if self.core is None else self.core.controls
        return RunState.RUNNING if controls is None else controls.pause_controller.state

    def become_ready(self, core: LoadedCore) -> None:
        """The model is loaded. Too late, and without effect, when the process is already on its way out.

        An engine that steps with others is ready when they have met for the first time.
        """
        if self.lifecycle.state is not EngineState.LOADING:
            return
        self.core = core
        if core.lockstep is None:
            self.lifecycle.move_to(EngineState.READY)
            return
        identity = self.identity
        logger.info(
            "loaded, waits for the other ranks of its group, and for the coordinator to let them meet",
            extra={"group": identity.dp_group, "rank": identity.dp_rank, "size": identity.dp_size},
        )
        self.progress = LoadProgress("group", 0, identity.dp_size)
        self.note_rank_status(core.lockstep.rank_status)

    def note_rank_status(self, rank_status: RankStatus) -> None:
        """The engine stands elsewhere among the ranks that step together; whoever listens is told."""
        if rank_status.generation and self.core is not None and self.lifecycle.state is EngineState.LOADING:
            self.lifecycle.move_to(EngineState.READY)
        for listener in self.on_rank_status:
            listener(rank_status)

    @property
    def is_awaited(self) -> bool:
        """Whether other ranks step with this engine, and a coordinator can have them go on without it."""
        driver = None if self.core is None else self.core.lockstep
        return self.is_member and driver is not None and driver.rank_status.is_awaited

    def note_member(self, is_member: bool) -> None:
        """A coordinator has taken this engine's registration, or is away; whoever listens is told."""
        if is_member == self.is_member:
            return
        self.is_member = is_member
        for listener in self.on_member:
            listener(is_member)

    def renew(self, facts: EngineFacts) -> None:
        """The engine serves other weights than before; whoever was told what it is hears it again."""
        if self.core is not None and self.lifecycle.state is EngineState.READY and facts != self.core.facts:
            self.core = replace(self.core, facts=facts)
            self.lifecycle.repeat()

    def fail(self, failure: Failure) -> None:
        """Loading or the loop ended by an error."""
        if not self.lifecycle.has_ended:
            self.failure = failure
            self.lifecycle.move_to(EngineState.FAILED)

    def _give_up(self, request_id: str) -> None:
        self.inbox.put(Abort(request_id, "session_lost"))
        self.inbox.put(Forget(request_id))


def _call_later(delay_s: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, call)
