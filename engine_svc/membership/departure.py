"""How an engine goes: first without requests, then without its group, then without its process.

Belongs to the event loop. Knows no stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import ServedEngine

logger = logging.getLogger(__name__)


class Departure:
    """The end of one engine.

    until_dry: refuses new requests, and returns when no running one can come to its end here any more.
    stop_process: ends the process as its supervisor would, which calls `end`.
    """

    def __init__(
        self,
        engine: ServedEngine,
        *,
        until_dry: Callable[[], Awaitable[None]],
        stop_process: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._lifecycle = engine.lifecycle
        self._until_dry = until_dry
        self._stop_process = stop_process
        self._is_leaving = False  # the group, which may be taken back
        self._is_ending = False  # the process, which is not
        self._ending: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._lifecycle.subscribe(lambda state: self._changed.set())
        engine.on_rank_status.append(lambda rank_status: self._changed.set())
        engine.on_member.append(lambda is_member: self._changed.set())

    async def run_dry(self) -> None:
        """Take no new requests, and return when the others have ended; the engine goes on to step.

        An engine that goes already is waited for as well, and cannot be kept.
        """
        if self._lifecycle.state is EngineState.READY:
            self._is_leaving = True
            self._lifecycle.move_to(EngineState.DRAINING)
        if self._lifecycle.state is EngineState.DRAINING:
            await self._until_dry()

    def stay(self) -> None:
        """Take requests again, where nothing but a group was to be left."""
        is_kept = self._is_leaving and self._ending is None and not self._is_ending
        if is_kept and self._lifecycle.state is EngineState.DRAINING:
            self._lifecycle.move_to(EngineState.READY)
        self._is_leaving = False

    def leave(self) -> None:
        """The group goes on without this engine: its process ends."""
        logger.info("left the group, the process ends")
        self._stop()

    def drain(self, deadline_s: float | None) -> None:
        """Let running requests end, for so long at most, then end the process. Once begun, it goes on.

        Of several deadlines the latest holds; to say none takes no other back.
        """
        if self._ending is not None:
            if deadline_s is None:
                return
            self._ending.cancel()
        self._ending = asyncio.create_task(self._drain(deadline_s))

    async def end(self, end_sessions: Callable[[], Awaitable[None]]) -> None:
        """What an engine does that was told to end: run dry, leave its group in order, end its sessions.

        Other ranks that step with it are let go on without it by the coordinator, so that they lose nothing;
        where there is none, or where all stand still by an agreement, nobody could, and nobody is waited for.
        To be cancelled where that takes too long.
        """
        self._is_ending = True
        if self._lifecycle.state is EngineState.READY:
            self._lifecycle.move_to(EngineState.DRAINING)
        if self._lifecycle.state is EngineState.DRAINING:
            await self._until_dry()
            await self._until_released()
        await end_sessions()

    async def _until_released(self) -> None:
        """Wait until no rank needs this engine, as nothing else would be left for it to do."""
        while self._lifecycle.state is EngineState.DRAINING and self._engine.is_awaited:
            self._changed.clear()
            await self._changed.wait()

    async def _drain(self, deadline_s: float | None) -> None:
        if self._lifecycle.state is EngineState.READY:
            self._lifecycle.move_to(EngineState.DRAINING)
        if self._lifecycle.state is EngineState.DRAINING:
            try:
                async with asyncio.timeout(deadline_s):
                    await self._until_dry()
            except TimeoutError:
                logger.warning("drain cut short", extra={"deadline_s": deadline_s})
                # Ends the sessions in words of their own; what is left runs elsewhere.
                if self._lifecycle.state is EngineState.DRAINING:
                    self._lifecycle.move_to(EngineState.STOPPED)
        self._stop()

    def _stop(self) -> None:
        """Have the process end; one that does already would take a second word for hurry."""
        if not self._is_ending:
            self._is_ending = True
            self._stop_process()
