"""What routing does to the time to first token under a skewed load, on real engines, policy beside policy.

python -m benchmarks.routing --json benchmarks/results/routing.json

Every 8th prompt is 50 times as long as the others, so that round robin over 4 engines sends all the long
ones to one of them. Requests come at random instants, for each policy at the same ones, so often that the
engines have work for the given share of their time; rounds of the policies take turns. Exits with 1 where
the 99th percentile of `kv-aware` is more than 0.7 times that of `round-robin`.

Engines, streams and frontends are the real ones. A step's time is that of the small model on the processor,
and that of a device of each engine's own which takes `--device-us` a token; 0 leaves the processor alone,
which says something where each engine has a core for itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import torch

from benchmarks.checkpoint import CheckpointShape, make_checkpoint
from benchmarks.failover_processes import Fleet, ServicePlan, is_engine_key
from benchmarks.report import Report, Row, print_table
from benchmarks.routing_device import VARIABLE, write_distribution
from service_kit.channel import open_channel
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2

_POLICIES = ("round-robin", "load", "kv-aware")
_BASELINE, _CANDIDATE = "round-robin", "kv-aware"
_MAX_RATIO = 0.7
_LONG_EVERY = 8
_LONG_FACTOR = 50
_SHORT_TOKENS = 32
_OUTPUT_TOKENS = 4
# The tokenizer's ordinary tokens lie there.
_FIRST_ID, _LAST_ID = 300, 2000
_SHAPE = CheckpointShape(
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=128,
    vocabulary_size=2_048,
)
_NUM_CALIBRATIONS = 3
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes after the round's start, and its prompt, which no other shares."""

    at_s: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pace:
    """What a long and a short request take alone, and how far requests are apart for the wanted load."""

    long_s: float
    short_s: float
    interval_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all rounds, print a row a policy; 1 where the default is not clearly better than round robin."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        pace, times = asyncio.run(_run(Path(folder), options))
    rows = [_row(policy, times[policy], times[_BASELINE]) for policy in _POLICIES]
    print_table(rows)
    if options.json is not None:
        settings = {
            "engines": options.engines,
            "rounds": options.rounds,
            "requests_a_round": options.requests,
            "utilisation": options.utilisation,
            "device_us": options.device_us,
            "long_every": _LONG_EVERY,
            "short_tokens": _SHORT_TOKENS,
            "long_tokens": _SHORT_TOKENS * _LONG_FACTOR,
            "long_alone_ms": 1000 * pace.long_s,
            "short_alone_ms": 1000 * pace.short_s,
            "interval_ms": 1000 * pace.interval_s,
        }
        Report("routing", settings, rows).write(options.json)
    ratio = _percentile(times[_CANDIDATE], 0.99) / _percentile(times[_BASELINE], 0.99)
    print(f"p99 of {_CANDIDATE} over p99 of {_BASELINE}: {ratio:.2f}, the limit is {_MAX_RATIO}")
    return int(ratio > _MAX_RATIO)


async def _run(folder: Path, options: argparse.Namespace) -> tuple[Pace, dict[str, list[float]]]:
    times: dict[str, list[float]] = {policy: [] for policy in _POLICIES}
    async with Fleet(folder) as fleet:
        await _start(fleet, folder, options)
        frontends = dict(zip(_POLICIES, fleet.of("frontend"), strict=True))
        channels = {policy: open_channel(one.address, profile="public") for policy, one in frontends.items()}
        pace = await _calibrate(channels[_BASELINE], options)
        for number in range(options.rounds):
            arrivals = _arrivals(options.requests, pace.interval_s, seed=number)
            for policy in _POLICIES:
                times[policy] += await _round(channels[policy], arrivals, salt=policy)
                await _until_idle(fleet)
        for channel in channels.values():
            await channel.close(None)
    return pace, times


async def _start(fleet: Fleet, folder: Path, options: argparse.Namespace) -> None:
    """Engines of one thread each, and a frontend for each policy, all of which know all engines."""
    model, installed = folder / "model", folder / "installed"
    make_checkpoint(model, _SHAPE, dtype=torch.float32, seed=0)
    environment = {}
    if options.device_us:
        write_distribution(installed)
        environment = {VARIABLE: str(options.device_us), "PYTHONPATH": str(installed)}
    for index in range(options.engines):
        place = (f"--data-parallel-rank={index}", f"--data-parallel-size={options.engines}")
        # Of one size, however long a prompt is: no engine has a head start.
        flags = (str(model), "--num-threads=1", "--max-num-batched-tokens=512", *place)
        fleet.add(ServicePlan("engine", index, flags, environment))
    known = tuple(f"--engine={engine.address}" for engine in fleet.of("engine"))
    for index, policy in enumerate(_POLICIES):
        chosen = (*known, "--text-workers=1", f"--routing-policy={policy}")
        fleet.add(ServicePlan("frontend", index, chosen))
    await fleet.start()
    await fleet.until_routed()


async def _calibrate(channel: grpc.aio.Channel, options: argparse.Namespace) -> Pace:
    chance = random.Random(-1)
    medians = []
    for num_tokens in (_SHORT_TOKENS * _LONG_FACTOR, _SHORT_TOKENS):
        durations = []
        # Each engine once for warming, then some more times.
        for _ in range(options.engines + _NUM_CALIBRATIONS):
            started_at = time.monotonic()
            await _first_token(channel, Arrival(0.0, _prompt(chance, num_tokens)), "")
            durations.append(time.monotonic() - started_at)
        medians.append(sorted(durations[options.engines :])[_NUM_CALIBRATIONS // 2])
    long_s, short_s = medians
    mean_s = (long_s + (_LONG_EVERY - 1) * short_s) / _LONG_EVERY
    num_at_once = options.engines
    if not options.device_us:
        num_at_once = min(num_at_once, len(os.sched_getaffinity(0)))
    return Pace(long_s, short_s, mean_s / (options.utilisation * num_at_once))


def _arrivals(num_requests: int, interval_s: float, *, seed: int) -> list[Arrival]:
    chance, at_s, arrivals = random.Random(seed), 0.0, []
    for index in range(num_requests):
        is_long = index % _LONG_EVERY == _LONG_EVERY - 1
        arrivals.append(Arrival(at_s, _prompt(chance, _SHORT_TOKENS * (_LONG_FACTOR if is_long else 1))))
        at_s += chance.expovariate(1 / interval_s)
    return arrivals


def _prompt(chance: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(chance.randrange(_FIRST_ID, _LAST_ID) for _ in range(num_tokens))


async def _round(channel: grpc.aio.Channel, arrivals: Sequence[Arrival], *, salt: str) -> list[float]:
    """The time to first token of each request, in seconds."""
    started_at = time.monotonic()

    async def send(arrival: Arrival) -> float:
        await asyncio.sleep(max(0.0, started_at + arrival.at_s - time.monotonic()))
        # From when it should have been sent: a client that is late hides nothing.
        return await _first_token(channel, arrival, salt) - started_at - arrival.at_s

    return list(await asyncio.gather(*map(send, arrivals)))


async def _first_token(channel: grpc.aio.Channel, arrival: Arrival, salt: str) -> float:
    """When its first token came; returns when its last has come."""
    request = generate_pb2.GenerateRequest(
        sampling=sampling_pb2.SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0, ignore_eos=True),
        # The policies get the same prompts, and no cache of another one's round.
        cache_salt=salt,
    )
    request.token_ids.ids.extend(arrival.token_ids)
    first_at = 0.0
    async for message in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=_LIMIT_S):
        if not first_at and message.WhichOneof("event") == "delta":
            first_at = time.monotonic()
    return first_at


async def _until_idle(fleet: Fleet) -> None:
    """Wait until no frontend has anything in an engine, and every engine has had the time to say so."""
    for frontend in fleet.of("frontend"):
        # Another process has no event to wait for.
        while any(  # noqa: ASYNC110
            value for key, value in (await frontend.status()).items() if is_engine_key(key, "num_in_flight")
        ):
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.6)


def _row(policy: str, times: Sequence[float], baseline: Sequence[float]) -> Row:
    ratio = _percentile(times, 0.99) / _percentile(baseline, 0.99)
    return {
        "policy": policy,
        "requests": len(times),
        "mean_ms": 1000 * sum(times) / len(times),
        "p50_ms": 1000 * _percentile(times, 0.5),
        "p90_ms": 1000 * _percentile(times, 0.9),
        "p99_ms": 1000 * _percentile(times, 0.99),
        "max_ms": 1000 * max(times),
        "p99_over_round_robin": ratio,
    }


def _percentile(times: Sequence[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="of each policy")
    parser.add_argument("--requests", type=int, default=128, help="in a round")
    parser.add_argument("--device-us", type=int, default=150, help="that a token takes an engine's device")
    parser.add_argument("--utilisation", type=float, default=0.4, help="share of the time there is work")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
