"""How an engine goes on somebody's wish: first without requests, then without its process. Knows no stream.

Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from engine_svc.lifecycle import EngineState, Lifecycle

logger = logging.getLogger(__name__)


class Departure:
    """The end of one engine.

    until_dry: refuses new requests, and returns when no running one can come to its end here any more.
    stop_process: ends the process as its supervisor would, which drains what is left.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        *,
        until_dry: Callable[[], Awaitable[None]],
        stop_process: Callable[[], None],
    ) -> None:
        self._lifecycle = lifecycle
        self._until_dry = until_dry
        self._stop_process = stop_process
        self._is_leaving = False  # the group, which may be taken back
        self._ending: asyncio.Task[None] | None = None

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
        if self._is_leaving and self._ending is None and self._lifecycle.state is EngineState.DRAINING:
            self._lifecycle.move_to(EngineState.READY)
        self._is_leaving = False

    def leave(self) -> None:
        """The group goes on without this engine: its process ends."""
        logger.info("left the group, the process ends")
        self._stop_process()

    def drain(self, deadline_s: float | None) -> None:
        """Let running requests end, for so long at most, then end the process. Once begun, it goes on."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._drain(deadline_s))

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
        self._stop_process()
