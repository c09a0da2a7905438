"""What a coordinator does without being asked, beside serving. Knows nothing of what that is."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Coroutine, Iterable

logger = logging.getLogger(__name__)

# As an engine whose loop fails.
EXIT_LOOP_FAILED = 70


async def serve_beside(works: Iterable[Coroutine[None, None, None]], serving: Awaitable[int]) -> int:
    """Run `works` for as long as `serving` lasts; its exit code, or 70 where one of them has failed.

    An error in any of them is a bug, without which leases or groups would stand still in silence: the process
    is told to end, the way its supervisor would, so that health says so and another one takes its place.
    """
    has_failed = False

    def look_at_end(task: asyncio.Task[None]) -> None:
        nonlocal has_failed
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("background task failed", exc_info=error)
            has_failed = True
            os.kill(os.getpid(), signal.SIGTERM)

    tasks = [asyncio.ensure_future(work) for work in works]
    for task in tasks:
        task.add_done_callback(look_at_end)
    try:
        exit_code = await serving
    finally:
        for task in tasks:
            task.cancel()
    return EXIT_LOOP_FAILED if has_failed else exit_code
