"""What the I/O side knows of the engine it serves: state, progress, and once it is loaded, how to enter.

Owned by the event loop; the engine thread reaches it only through callbacks posted there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine_svc.artifacts import Artifact
from engine_svc.facts import EngineFacts, EngineIdentity, LoadProgress
from engine_svc.lifecycle import EngineState, Lifecycle
from engine_svc.mailbox import Board, Inbox, KVEventLog
from engine_svc.request import Request
from service_kit.clock import Clock


@dataclass(frozen=True, slots=True)
class LoadedCore:
    """What the I/O side may use of a loaded engine. Both functions may run beside the loop."""

    facts: EngineFacts
    refusal: Callable[[Request], str | None]  # why a request can never be served, or None
    prepare: Callable[[Request], None]  # work that need not be done in the loop: block hashes


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine ended, and what its process exits with."""

    reason: str
    exit_code: int


@dataclass(slots=True, eq=False)
class ServedEngine:
    """One engine as its sessions, its admin service and its membership see it."""

    identity: EngineIdentity
    artifacts: tuple[Artifact, ...]
    lifecycle: Lifecycle
    inbox: Inbox
    board: Board
    clock: Clock
    drain_deadline_s: float = 0.0
    kv_event_log: KVEventLog | None = None  # None: nobody may follow the prefix cache
    progress: LoadProgress = field(default_factory=LoadProgress)
    core: LoadedCore | None = None
    failure: Failure | None = None

    def become_ready(self, core: LoadedCore) -> None:
        """The model is loaded. Too late, and without effect, when the process is already on its way out."""
        if self.lifecycle.state is EngineState.LOADING:
            self.core = core
            self.lifecycle.move_to(EngineState.READY)

    def fail(self, failure: Failure) -> None:
        """Loading or the loop ended by an error."""
        if not self.lifecycle.has_ended:
            self.failure = failure
            self.lifecycle.move_to(EngineState.FAILED)
