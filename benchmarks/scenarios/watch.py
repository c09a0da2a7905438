"""CPU that it takes an engine to show its scheduler, with 64 requests in most of 2,000 KV blocks.

    python -m benchmarks watch --json benchmarks/results/watch.json

The requests are paused, so that the engine does nothing else. Windows take turns; in a watched one a client
of WatchScheduler gets ten states a second with all requests and blocks. Promised: watching takes less than
5 % of a core, as the median of the differences.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import grpc.aio
import torch

from benchmarks.checkpoint import CheckpointShape, make_checkpoint
from benchmarks.report import Report, Row, median_interval
from benchmarks.rig.processes import Fleet, ServicePlan
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import utility_pb2
from triptych_cli.bench.dataset import Turn
from triptych_cli.bench.load import LoadGenerator
from triptych_cli.bench.transport import GRPCTransport, RequestBuilder
from triptych_kit.channel import open_channel
from triptych_kit.clock import MonotonicClock

MAX_PERCENT = 5.0
NUM_BLOCKS = 2000
_NUM_REQUESTS, _PROMPT, _NEW = 64, 400, 1000
_SETTLE_S = 1.0
_BEGIN_S = 8.0  # until all requests run
_REQUEST = admin_pb2.WatchSchedulerRequest(interval_ms=100, max_requests=512, max_blocks=16_384)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder, "model"), CheckpointShape(), dtype=torch.bfloat16, seed=options.seed)
        row = asyncio.run(_measure(Path(folder), options))
    settings = {name: getattr(options, name) for name in ("window_s", "rounds", "seed")}
    cost = float(str(row["cost_percent"]))
    shortfalls = [] if cost < MAX_PERCENT else [f"watching takes {cost:.1f} % of a core"]
    return Report("watch", settings, [row], shortfalls)


async def _measure(folder: Path, options: argparse.Namespace) -> Row:
    choose = random.Random(options.seed)
    vocabulary = CheckpointShape().vocabulary_size
    conversations = [
        [Turn([choose.randrange(vocabulary) for _ in range(_PROMPT)], _NEW)] for _ in range(_NUM_REQUESTS)
    ]
    sampling = sampling_pb2.SamplingParams(temperature=0.0, ignore_eos=True)
    async with Fleet(folder) as fleet, contextlib.AsyncExitStack() as stack:
        coordinator = fleet.add(ServicePlan("coordinator", 0))
        await fleet.start()
        known = f"--coordinator={coordinator.address}"
        flags = (str(folder / "model"), "--num-threads=1", f"--num-kv-blocks={NUM_BLOCKS}", known)
        engine = fleet.add(ServicePlan("engine", 0, flags))
        frontend = fleet.add(ServicePlan("frontend", 0, (known,)))
        await fleet.start()
        await fleet.until_routed()
        to_frontend = await stack.enter_async_context(open_channel(frontend.address, profile="public"))
        to_engine = await stack.enter_async_context(open_channel(engine.address))
        generator = LoadGenerator(
            GRPCTransport([to_frontend], RequestBuilder("", sampling, options.seed)), MonotonicClock()
        )
        load = asyncio.ensure_future(generator.run(conversations, [0.0] * _NUM_REQUESTS))
        await asyncio.sleep(_BEGIN_S)
        async with open_channel(engine.admin_address) as admin:
            pause = utility_pb2.PauseCall(mode=utility_pb2.PAUSE_MODE_KEEP, clear_cache=False)
            call = utility_pb2.UtilityCall(pause=pause)
            await admin_pb2_grpc.AdminServiceStub(admin).Utility(admin_pb2.UtilityRequest(call=call))
        shares: dict[bool, list[float]] = {False: [], True: []}
        held: list[float] = []
        # The first round is not counted.
        for index in range(options.rounds + 1):
            for is_watched in (False, True) if index % 2 else (True, False):
                watching = asyncio.ensure_future(_watch(to_engine, held)) if is_watched else None
                await asyncio.sleep(_SETTLE_S)
                share = await _cpu_percent(engine.pid, options.window_s)
                if watching is not None:
                    watching.cancel()
                shares[is_watched] += [share] if index else []
            print(f"round {index}: {held[-1]:.0f} blocks held, {share:.1f} %", file=sys.stderr)
        load.cancel()
    costs = [on - off for off, on in zip(shares[False], shares[True], strict=True)]
    interval = median_interval(costs, options.seed)
    return {
        "blocks_held": statistics.median(held),
        "states": len(held),
        "unwatched_percent": statistics.median(shares[False]),
        "watched_percent": statistics.median(shares[True]),
        "cost_percent": interval.estimate,
        "low": interval.low,
        "high": interval.high,
    }


async def _watch(channel: grpc.aio.Channel, held: list[float]) -> None:
    async for state in admin_pb2_grpc.AdminServiceStub(channel).WatchScheduler(_REQUEST):
        held.append(sum(len(request.block_ids) for request in state.requests))  # noqa: PERF401


async def _cpu_percent(pid: int, window_s: float) -> float:
    """CPU time of a process in the coming seconds, in percent of a core."""
    before, began_at = _cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(window_s)
    return 100 * (_cpu_seconds(pid) - before) / (time.monotonic() - began_at)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
