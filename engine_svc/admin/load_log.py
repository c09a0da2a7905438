"""A log line about the load of the engine, every ten seconds while it has any. Runs on the event loop."""

from __future__ import annotations

import asyncio
import logging

from engine_svc.loop.mailbox import LoopStats, StatsSnapshot
from triptych_kit.clock import Clock

logger = logging.getLogger(__name__)

_INTERVAL_S = 10.0


class LoadLog:
    """Compares the statistics of the loop with those of the line before."""

    def __init__(self, snapshot: StatsSnapshot, clock: Clock) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._last = LoopStats()
        self._last_at = clock.now()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.write()

    def write(self) -> None:
        """Log the requests and blocks now, and the tokens since the last call; nothing while it was idle."""
        stats, now = self._snapshot.read(), self._clock.now()
        last, self._last = self._last, stats
        passed_s, self._last_at = now - self._last_at, now
        scheduler, before = stats.scheduler, last.scheduler
        if scheduler is None or passed_s <= 0:
            return
        num_prompt = stats.num_prompt_tokens - last.num_prompt_tokens
        num_output = stats.num_generated_tokens - last.num_generated_tokens
        num_waiting = scheduler.num_waiting + scheduler.num_blocked
        if not (scheduler.num_running or num_waiting or num_prompt or num_output):
            return
        num_queries = scheduler.prefix_queries - (before.prefix_queries if before else 0)
        num_hits = scheduler.prefix_hits - (before.prefix_hits if before else 0)
        logger.info(
            "load",
            extra={
                "running": scheduler.num_running,
                "waiting": num_waiting,
                "kv_use_percent": _percent(scheduler.num_used_blocks, scheduler.num_total_blocks),
                "prompt_tokens_per_s": round(num_prompt / passed_s, 1),
                "output_tokens_per_s": round(num_output / passed_s, 1),
                # Without admissions there is no rate.
                **({"prefix_hit_percent": _percent(num_hits, num_queries)} if num_queries else {}),
            },
        )


def _percent(part: int, whole: int) -> float:
    return round(100 * part / max(1, whole), 1)
