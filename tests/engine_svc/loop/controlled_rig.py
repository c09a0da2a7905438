"""A served engine with a fake model and fake ranks, and an operator's calls into it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_svc.admin.calls import AdminCalls
from engine_svc.core.control import Collective
from engine_svc.loop.controls import EngineControls
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Call
from engine_svc.loop.protocols import Lockstep, NoLockstep
from engine_svc.scheduler.scheduler import Scheduler
from tests.engine_svc.fakes import LIMIT_S, expected_tokens
from tests.engine_svc.session.service_rig import (
    ServiceRig,
    StreamClient,
    added,
    make_entry,
    prompt_of,
    serving,
)
from triptych.admin.v1 import admin_pb2
from triptych.engine.v1 import utility_pb2
from triptych_kit.clock import MonotonicClock

ABORT, WAIT, KEEP = (
    utility_pb2.PAUSE_MODE_ABORT,
    utility_pb2.PAUSE_MODE_WAIT,
    utility_pb2.PAUSE_MODE_KEEP,
)
NEW_DIGEST = "ef" * 32
COLLECTIVES = (
    Collective("memory"),
    Collective("scale", {"factor": float, "layer": int, "dry": bool, "note": str}),
)


class FakeRunners:
    """Ranks that remember what they were asked. `error` is what they answer the next time."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []
        self.error: Exception | None = None

    def call_all(self, name: str, arguments: Mapping[str, Any]) -> list[Mapping[str, object]]:
        if name == "sleep":
            self._note(name, arguments["level"])
            return [{}]
        folder = arguments["folder"]
        source = folder and Path(folder)
        self._note(name, (source, arguments["names"]) if arguments["names"] else source)
        return [{"digest": NEW_DIGEST}]

    def call_each(
        self, name: str, arguments: Mapping[str, Any] | None = None, *, undo: str = ""
    ) -> list[Mapping[str, object]]:
        asked = {"wake": "tags", "start_profile": "prefix"}.get(name)
        argument = arguments if asked is None else (arguments or {})[asked]
        self._note(name, set(argument) if name == "wake" else argument)
        return [{"file": "trace", "result": str(rank)} for rank in range(2)]

    def _note(self, name: str, argument: object) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.asked.append((name, argument))


@dataclass
class Controlled:
    """The engine, a frontend of it, and its admin listener's calls."""

    rig: ServiceRig
    runners: FakeRunners
    frontend: StreamClient
    weights: list[tuple[Path, str]]

    def __post_init__(self) -> None:
        self.admin = AdminCalls(self.rig.engine)

    async def call(self, **call: object) -> utility_pb2.UtilityResult:
        """Make a call with the admin role; raises its ServiceError."""
        request = admin_pb2.UtilityRequest(call=utility_pb2.UtilityCall(**call))
        async with asyncio.timeout(LIMIT_S):
            return (await self.admin.serve(request)).result

    async def pause(self, mode: utility_pb2.PauseMode = KEEP, *, clear_cache: bool = False) -> None:
        """Pause; returns when the engine says that it is done."""
        await self.call(pause=utility_pb2.PauseCall(mode=mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        await self.call(resume=utility_pb2.ResumeCall())

    async def pass_by(self) -> None:
        """Wait until the engine thread has taken in all that was sent, turned once more and answered."""
        loop, turned = asyncio.get_running_loop(), asyncio.Event()
        await self.frontend.flush()

        def work() -> None:
            loop.call_soon_threadsafe(turned.set)

        for _ in range(2):
            turned.clear()
            self.rig.engine.inbox.put(Call(work))
            await turned.wait()
        # An answer goes out before a step that waits with it, and the next answer behind it.
        for _ in range(2):
            await self.frontend.flush()

    async def let_calls_begin(self) -> None:
        """Let tasks that were just made put their calls into the inbox."""
        for _ in range(3):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def controlled(
    *, profile_dir: Path | None = None, lockstep: Lockstep | None = None, **options: Any
) -> AsyncIterator[Controlled]:
    """A loaded engine with one frontend, ready for both."""
    runners, weights = FakeRunners(), list[tuple[Path, str]]()

    def controls(engine: Engine, scheduler: Scheduler) -> EngineControls:
        return EngineControls(
            loop=engine,
            scheduler=scheduler,
            ranks=runners,
            clock=MonotonicClock(),
            weights_folder=Path("/models/first"),
            profile_dir=profile_dir,
            collectives=COLLECTIVES,
            lockstep=lockstep or NoLockstep(),
            on_weights=lambda folder, digest: weights.append((folder, digest)),
        )

    rig = ServiceRig(controls=controls, **options)
    async with serving(rig) as stub:
        frontend = StreamClient(stub, "operator-test")
        await frontend.open()
        await frontend.until(lambda: "ready" in frontend.kinds())
        try:
            yield Controlled(rig, runners, frontend, weights)
        finally:
            await frontend.close()


async def running(engine: Controlled, *handles: int, num_tokens: int) -> None:
    """Add requests and hold the model where they have a part of their tokens."""
    entries = [make_entry(handle, max_tokens=num_tokens) for handle in handles]
    await added(engine.rig, engine.frontend, *entries, hold_at=8)


def tokens_of(handle: int, num_tokens: int) -> list[int]:
    return expected_tokens(prompt_of(handle), handle, num_tokens)
