"""The protocol of an engine that `LLM` starts itself, and the error of one that has ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from triptych_kit.errors import Unavailable

if TYPE_CHECKING:
    from frontend_svc.engines.connection.transport import EngineTransport


class EngineDead(Unavailable):
    """The engine has ended for good. Every later call raises this at once."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the engine is dead: {why}", reason="ENGINE_DEAD")


class OwnEngine(Protocol):
    """An engine that runs for one frontend, from `start` to `close`."""

    @property
    def address(self) -> str:
        """The name of the engine in the frontend, once it is started."""
        ...

    @property
    def death(self) -> asyncio.Future[str]:
        """Resolves to the reason if it ends by itself."""
        ...

    async def start(self) -> None:
        """Load; returns once requests are accepted.

        Raises a ValueError or OSError for what cannot be loaded, or EngineDead.
        """
        ...

    def connect(self, address: str) -> EngineTransport: ...

    async def close(self) -> None: ...
