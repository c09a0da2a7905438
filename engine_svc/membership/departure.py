"""Shutdown of an engine: it drains its requests, leaves its group, then ends its process.

Runs on the event loop. Knows no stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import ServedEngine

logger = logging.getLogger(__name__)


class Departure:
    """Drains one engine and ends it.

    until_dry: returns when no running request can finish here any more.
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
        self._is_leaving = False  # leaves its group, which can be cancelled
        self._is_ending = False  # the process ends, which cannot
        self._ending: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._lifecycle.subscribe(lambda state: self._changed.set())
        engine.on_rank_status.append(lambda rank_status: self._changed.set())
        engine.on_member.append(lambda is_member: self._changed.set())

    async def run_dry(self) -> None:
        """Refuse new requests, and return when the running ones have finished. The engine keeps stepping.

        Also waits if the engine is already draining for another reason; `stay` does not cancel that.
        """
        if self._lifecycle.state is EngineState.READY:
            self._is_leaving = True
            self._lifecycle.move_to(EngineState.DRAINING)
        if self._lifecycle.state is EngineState.DRAINING:
            await self._until_dry()

    def stay(self) -> None:
        """Accept requests again if the engine was only draining to leave its group."""
        is_kept = self._is_leaving and self._ending is None and not self._is_ending
        if is_kept and self._lifecycle.state is EngineState.DRAINING:
            self._lifecycle.move_to(EngineState.READY)
        self._is_leaving = False

    def leave(self) -> None:
        """End the process: the group continues without this engine."""
        logger.info("left the group, ending the process")
        self._stop()

    def drain(self, deadline_s: float | None) -> None:
        """Wait at most `deadline_s` for running requests, then end the process. It cannot be cancelled.

        A later call replaces the deadline, unless its own is None.
        """
        if self._ending is not None:
            if deadline_s is None:
                return
            self._ending.cancel()
        self._ending = asyncio.create_task(self._drain(deadline_s))

    async def end(self, end_sessions: Callable[[], Awaitable[None]]) -> None:
        """Shut down in order: finish running requests, leave the group, end the sessions.

        The coordinator re-forms the group without this engine, so that its other ranks lose nothing. Does not
        wait for that without a coordinator, or while all ranks are paused. Cancel it if it takes too long.
        """
        self._is_ending = True
        if self._lifecycle.state is EngineState.READY:
            self._lifecycle.move_to(EngineState.DRAINING)
        if self._lifecycle.state is EngineState.DRAINING:
            await self._until_dry()
            await self._until_released()
        await end_sessions()

    async def _until_released(self) -> None:
        """Wait until no other rank needs this engine."""
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
                logger.warning("drain timeout", extra={"deadline_s": deadline_s})
                # Ends the sessions with the status of a drained engine; remaining requests run elsewhere.
                if self._lifecycle.state is EngineState.DRAINING:
                    self._lifecycle.move_to(EngineState.STOPPED)
        self._stop()

    def _stop(self) -> None:
        """End the process, once: it would take a second signal as a request to hurry."""
        if not self._is_ending:
            self._is_ending = True
            self._stop_process()
