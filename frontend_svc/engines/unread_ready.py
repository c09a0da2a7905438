"""What an engine has said of itself last, until it is read, which may take longer than a stream lasts."""

from __future__ import annotations

import asyncio

from triptych.engine.v1 import session_pb2


class UnreadReady:
    """Holds the newest `ready` of a session, which an engine sends once, over as many streams as it takes."""

    def __init__(self) -> None:
        self._ready: session_pb2.Ready | None = None
        self._is_told = asyncio.Event()

    def put(self, ready: session_pb2.Ready) -> None:
        """Take what the engine says, in place of what it said before."""
        self._ready = ready
        self._is_told.set()

    async def get(self) -> session_pb2.Ready:
        """What it has said last; waits for it. It stays here until it is known to be read."""
        while self._ready is None:
            self._is_told.clear()
            await self._is_told.wait()
        return self._ready

    def note_read(self, ready: session_pb2.Ready) -> None:
        """Forget `ready`, unless there is a newer one."""
        if self._ready is ready:
            self._ready = None

    def forget(self) -> None:
        """The session is over: in the next one the engine says all anew."""
        self._ready = None
