"""The stream that carries a session at a time. Knows no message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from service_kit.eager_writer import EagerWriter

# How long a stream may take to see that another carries its session.
_MAX_TAKEOVER_S = 1.0


class SessionStream:
    """A stream that carries a session, until it breaks or another takes its place.

    `abandon` ends the call, also where it waits in a write that nobody takes; `write` is that of the call.
    """

    def __init__(
        self, abandon: Callable[[], object], write: Callable[[bytes], Coroutine[Any, Any, object]]
    ) -> None:
        self.abandon = abandon
        self.writer = EagerWriter(write)
        self.is_idle = False  # nothing waits to be said: whoever has a step writes it

    def replace(self) -> None:
        """Another carries the session now. This one ends by itself, unless it waits in such a write."""
        asyncio.get_running_loop().call_later(_MAX_TAKEOVER_S, self.abandon)
