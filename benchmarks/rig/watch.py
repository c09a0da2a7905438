"""Reports of frontends about streams and engines during a fault, and the speed of the machine."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from benchmarks.report import percentile
from benchmarks.rig.processes import ServiceProcess, log_instant
from benchmarks.rig.streams import Load, StreamRecord, engine_ids

MIN_IN_FLIGHT = 20
_PLACED_LIMIT_S = 60.0
_STALE_LIMIT_S = 15.0
_LOG_LIMIT_S = 10.0
# The gap between tokens of one of 64 streams where two engines have two cores to themselves.
_NOMINAL_GAP_S = 0.15


@dataclass(frozen=True, slots=True)
class Calibration:
    """Gaps of an undisturbed run on this machine, and the factor for time limits that follows from them."""

    gap_p99_s: float
    scale: float


def calibrate(records: Sequence[StreamRecord]) -> Calibration:
    """Calibrate by the gaps between tokens of undisturbed streams."""
    gap_p99_s = percentile([gap for record in records for gap in record.gaps_s], 99)
    return Calibration(gap_p99_s, max(1.0, gap_p99_s / _NOMINAL_GAP_S))


async def placed(channel: grpc.aio.Channel, load: Load) -> dict[str, str]:
    """Which engine has which stream, once all of them are somewhere."""
    where: dict[str, str] = {}
    async with asyncio.timeout(_PLACED_LIMIT_S):
        while True:
            unknown = [record for record in load.records if not where.get(record.request_id)]
            open_ones = [record for record in unknown if record.ended_at is None]
            if not open_ones:
                return where
            where |= await engine_ids(channel, open_ones)


def recoveries(records: Sequence[StreamRecord], struck_at: float) -> list[float]:
    """Of each stream, the time from the strike to the end of its longest silence that ends after it.

    What the engine had sent before still comes in after the strike. A stream without another token counts to
    its end.
    """
    found = []
    for record in records:
        end = record.ended_at or time.monotonic()
        at = [record.sent_at, *record.token_instants]
        silences = [
            (later - earlier, later) for earlier, later in itertools.pairwise(at) if later > struck_at
        ]
        found.append((max(silences)[1] if silences else end) - struck_at)
    return found


async def detected_at(frontend: ServiceProcess, address: str, since: float) -> float:
    """When the frontend logged that an engine is not ready any more, in s since 1970, after `since`."""
    async with asyncio.timeout(_LOG_LIMIT_S):
        while True:
            for record in frontend.log_records():
                if record.get("msg") != "engine state" or record.get("engine") != address:
                    continue
                # A line's instant is cut to the millisecond.
                if record.get("state") != "ready" and log_instant(record) >= since - 0.001:
                    return log_instant(record)
            await asyncio.sleep(0.05)


async def moved_requests(frontend: ServiceProcess) -> int:
    """Requests that a frontend has sent on to another engine since it started."""
    return int((await frontend.status())["num_moved_requests"])


async def stale_outputs(frontend: ServiceProcess, address: str) -> int:
    """Outputs of moved requests that the engine sent all the same, once there are any; 0 after the limit."""
    key = f"engine.{address}.stale_outputs"
    try:
        async with asyncio.timeout(_STALE_LIMIT_S):
            while not (count := (await frontend.status()).get(key, 0)):  # noqa: ASYNC110  It does not tell.
                await asyncio.sleep(0.05)
    except TimeoutError:
        return 0
    return int(count)
