"""Writes to one engine's stream: answers to its registrations, and commands. Knows no meaning of either."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from coordinator_svc.commands import Commands
from triptych.coordinator.v1 import coordinator_pb2


class EngineWriter:
    """The one writer of a session. Keeps the newest answer and no queue: commands wait in `Commands`."""

    def __init__(self, commands: Commands, engine_id: str, session_id: int) -> None:
        self._commands = commands
        self._engine_id = engine_id
        self._session_id = session_id
        self._registered: coordinator_pb2.Registered | None = None
        self._has_news = asyncio.Event()

    def answer(self, registered: coordinator_pb2.Registered) -> None:
        """Answer a registration, before any command that comes after it."""
        self._registered = registered
        self._has_news.set()

    def wake(self) -> None:
        """There are commands to be sent."""
        self._has_news.set()

    async def run(self, write: Callable[[coordinator_pb2.EngineSessionResponse], Awaitable[None]]) -> None:
        """Write what there is to write, until cancelled."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            registered, self._registered = self._registered, None
            if registered is not None:
                await write(coordinator_pb2.EngineSessionResponse(registered=registered))
            for command in self._commands.take_unsent(self._engine_id, self._session_id):
                await write(coordinator_pb2.EngineSessionResponse(command=command))
