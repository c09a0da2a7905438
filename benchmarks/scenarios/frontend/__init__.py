"""CPU of the frontend a token, messages a second, and how late its event loop runs under load.

    python -m benchmarks frontend --parts output cpu lag --json benchmarks/results/frontend.json

The frontend is the real process, its clients are processes of their own. Its engine is synthetic, so that it
leaves the cores to others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from benchmarks.report import Report, Row
from benchmarks.rig.frontend import Clients, Served, clients, frontend, synthetic_engine
from benchmarks.scenarios.frontend.output import measure_output
from triptych_kit.telemetry.loop_lag import WINDOW_S

NUM_STREAMS = 256
TOKENS_PER_S = 20.0
NUM_CHATS = 32
NUM_PROMPTS = 50
PROMPT_CHARS = 100_000
_NUM_CLIENTS = 2
_CONNECTIONS = 8
_SETTLE_S = 3.0
_BEGIN_LIMIT_S = 30.0
_PROMPT_LIMIT_S = 30.0
_PARTS = ("output", "cpu", "lag_alone", "lag", "rate")
# More than a frontend delivers on a core, and not so much more that its readers are ended as too slow.
_AHEAD_TOKENS_PER_S = 130.0
_WORKER_COUNTS = (1, 2)
# Promised at most, by part and column.
_LIMITS = (
    ("output", "processing_us_per_token", 3.0),
    ("cpu", "frontend_us_per_token", 60.0),
    ("lag", "loop_lag_p99_ms", 20.0),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens of all clients and CPU of the frontend at an instant."""

    at: float
    num_tokens: int
    num_messages: int
    cpu_s: float
    tree_cpu_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--seconds", type=float, default=8.0, help="of a window of cpu and rate")


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    for part in options.parts:
        match part:
            case "output":
                rows += measure_output()
            case "cpu":
                rows += asyncio.run(measure_cpu(options.seconds))
            case "lag":
                rows += asyncio.run(measure_lag(part, NUM_PROMPTS))
            case "lag_alone":
                rows += asyncio.run(measure_lag(part, 0))
            case _:
                rows += asyncio.run(measure_rate(options.seconds))
    return Report("frontend", {"seconds": options.seconds}, rows, shortfalls(rows))


def shortfalls(rows: Sequence[Row]) -> list[str]:
    found = []
    for part, column, limit in _LIMITS:
        for row in rows:
            value = row[column] if row["part"] == part else None
            if isinstance(value, int | float) and value > limit:
                found.append(f"{part}: {column} is {value:.2f}, at most {limit:g} is promised")
    return found


async def measure_cpu(seconds: float) -> list[Row]:
    """CPU of the frontend for a delivered token, at a steady rate."""
    async with _streaming(synthetic_engine(TOKENS_PER_S)) as (served, processes):
        before, after = await _window(served, processes, seconds)
    num_tokens = after.num_tokens - before.num_tokens
    return [
        {
            "part": "cpu",
            "num_streams": NUM_STREAMS,
            "seconds": after.at - before.at,
            "num_tokens": num_tokens,
            "tokens_per_s_a_stream": _rate(before, after) / NUM_STREAMS,
            "tokens_per_message": num_tokens / (after.num_messages - before.num_messages),
            "frontend_us_per_token": (after.cpu_s - before.cpu_s) / num_tokens * 1e6,
            "with_text_workers_us_per_token": (after.tree_cpu_s - before.tree_cpu_s) / num_tokens * 1e6,
        }
    ]


async def measure_lag(part: str, num_prompts: int) -> list[Row]:
    """How late the loop runs with chats and logprobs among the streams, and long prompts beside them."""
    async with _streaming(synthetic_engine(TOKENS_PER_S), num_chats=NUM_CHATS) as (served, processes):
        return [{"part": part, **await _lag_row(served, processes, num_prompts)}]


async def _lag_row(served: Served, processes: Sequence[Clients], num_prompts: int) -> Row:
    times: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        before = await _sample(served, processes)
        if num_prompts:
            texts = await stack.enter_async_context(
                clients(
                    served.announcement.address,
                    prompts=num_prompts,
                    prompt_chars=PROMPT_CHARS,
                    prompt_seconds=WINDOW_S - 2,
                )
            )
        # The frontend's own gauge covers the last so many seconds.
        await asyncio.sleep(WINDOW_S)
        status, after = await served.status(), await _sample(served, processes)
        if num_prompts:
            async with asyncio.timeout(_PROMPT_LIMIT_S):
                # Another process has no event to wait for.
                while len(times := (await texts.counters())["prompt_times_s"]) < num_prompts:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
    return {
        "num_streams": NUM_STREAMS,
        "num_chats_with_logprobs": NUM_CHATS,
        "num_long_prompts": num_prompts,
        "longest_prompt_s": max(times, default=None),
        "tokens_per_s_a_stream": _rate(before, after) / NUM_STREAMS,
        "loop_lag_p50_ms": status["event_loop_lag_p50_ms"],
        "loop_lag_p99_ms": status["event_loop_lag_p99_ms"],
        "loop_lag_max_ms": status["event_loop_lag_max_ms"],
    }


async def measure_rate(seconds: float) -> list[Row]:
    """Messages a second that one and two frontend processes on one port deliver, the engine ahead of them."""
    rows: list[Row] = []
    for num_workers in _WORKER_COUNTS:
        flags = (f"--workers={num_workers}",) if num_workers > 1 else ()
        async with _streaming(synthetic_engine(_AHEAD_TOKENS_PER_S), flags=flags) as (served, processes):
            before, after = await _window(served, processes, seconds)
        rows.append(
            {
                "part": "rate",
                "num_workers": num_workers,
                "num_streams": NUM_STREAMS,
                "seconds": after.at - before.at,
                "messages_per_s": (after.num_messages - before.num_messages) / (after.at - before.at),
                "tokens_per_s": _rate(before, after),
                "cores_of_frontends": (after.tree_cpu_s - before.tree_cpu_s) / (after.at - before.at),
                "num_cores": len(os.sched_getaffinity(0)),
            }
        )
    return rows


@contextlib.asynccontextmanager
async def _streaming(
    engine_process: AbstractAsyncContextManager[str],
    *,
    num_chats: int = 0,
    flags: tuple[str, ...] = (),
    tokens: int = 500_000,
):
    """Engine, frontend and clients, once every stream has begun; a stream is of so many tokens."""
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(engine_process)
        served = await stack.enter_async_context(
            frontend(engine, "--max-queued-prompt-tokens=100000000", *flags)
        )
        processes = [
            await stack.enter_async_context(
                clients(
                    served.announcement.address,
                    streams=NUM_STREAMS // _NUM_CLIENTS,
                    chats=num_chats // _NUM_CLIENTS,
                    tokens=tokens,
                    connections=_CONNECTIONS,
                    seed=seed,
                )
            )
            for seed in range(_NUM_CLIENTS)
        ]
        async with asyncio.timeout(_BEGIN_LIMIT_S):
            # Other processes have no event to wait for.
            while sum([(await each.counters())["num_begun"] for each in processes]) < NUM_STREAMS:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        await asyncio.sleep(_SETTLE_S)
        yield served, processes


async def _window(served: Served, processes: Sequence[Clients], seconds: float) -> tuple[Sample, Sample]:
    before = await _sample(served, processes)
    await asyncio.sleep(seconds)
    return before, await _sample(served, processes)


async def _sample(served: Served, processes: Sequence[Clients]) -> Sample:
    counters = await asyncio.gather(*(each.counters() for each in processes))
    return Sample(
        time.monotonic(),
        sum(each["num_tokens"] for each in counters),
        sum(each["num_messages"] for each in counters),
        served.cpu_s(),
        served.tree_cpu_s(),
    )


def _rate(before: Sample, after: Sample) -> float:
    return (after.num_tokens - before.num_tokens) / (after.at - before.at)
