"""What routing does to the time to first token under a skewed load, on real engines, policy beside policy.

python -m benchmarks.routing --json benchmarks/results/routing.json

Every 8th prompt is 50 times as long as the others, so that round robin over 4 engines sends all the long
ones to one of them. Requests come at random instants, for each policy at the same ones; rounds of the
policies take turns. Exits with 1 where the 99th percentile of `kv-aware` is more than 0.7 times that of
`round-robin` in any round.

Engines, streams and frontends are the real ones, and what an engine computes it computes: with one thread,
so that an engine which gets all long prompts has one core for them, on a machine with two or more. They come
so often that they take `--long-share` of one core: a little more than one can do, and with all else some two
thirds of what two can.
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
from service_kit.channel import open_channel
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2

_POLICIES = ("round-robin", "load", "kv-aware")
_BASELINE, _CANDIDATE = "round-robin", "kv-aware"
_MAX_RATIO = 0.7
_LONG_EVERY = 8
SHORT_TOKENS = 32
LONG_TOKENS = 50 * SHORT_TOKENS
# Further ones cost as much as the short prompts, and are not what is asked for.
_OUTPUT_TOKENS = 1
# The tokenizer's ordinary tokens lie there.
_FIRST_ID, _LAST_ID = 300, 2000
# So large that a prompt takes what its matrix products take, and little more.
_SHAPE = CheckpointShape(
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=1_408,
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
    utilisation: float  # share of all cores that requests take so, if they take them as long as alone


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all rounds, print a row a policy; 1 where the default is not clearly better than round robin."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        pace, rounds = asyncio.run(_run(Path(folder), options))
    rows = [_row(policy, rounds[policy], rounds[_BASELINE]) for policy in _POLICIES]
    print_table(rows)
    if options.json is not None:
        settings = {
            "engines": options.engines,
            "rounds": options.rounds,
            "requests_a_round": options.requests,
            "long_share": options.long_share,
            "utilisation": pace.utilisation,
            "long_every": _LONG_EVERY,
            "short_tokens": SHORT_TOKENS,
            "long_tokens": LONG_TOKENS,
            "long_alone_ms": 1000 * pace.long_s,
            "short_alone_ms": 1000 * pace.short_s,
            "interval_ms": 1000 * pace.interval_s,
        }
        Report("routing", settings, rows).write(options.json)
    ratios = _ratios(rounds[_CANDIDATE], rounds[_BASELINE])
    told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"p99 of {_CANDIDATE} over p99 of {_BASELINE}, by round: {told}; the limit is {_MAX_RATIO}")
    return int(max(ratios) > _MAX_RATIO)


async def _run(folder: Path, options: argparse.Namespace) -> tuple[Pace, dict[str, list[list[float]]]]:
    rounds: dict[str, list[list[float]]] = {policy: [] for policy in _POLICIES}
    async with Fleet(folder) as fleet:
        await _start(fleet, folder / "model", options.engines)
        frontends = dict(zip(_POLICIES, fleet.of("frontend"), strict=True))
        channels = {policy: open_channel(one.address, profile="public") for policy, one in frontends.items()}
        pace = await _calibrate(channels[_BASELINE], options)
        for number in range(options.rounds):
            arrivals = make_arrivals(options.requests, interval_s=pace.interval_s, seed=number)
            for policy in _POLICIES:
                rounds[policy].append(await _round(channels[policy], arrivals, salt=policy))
                await _until_idle(fleet)
        for channel in channels.values():
            await channel.close(None)
    return pace, rounds


async def _start(fleet: Fleet, model: Path, num_engines: int) -> None:
    """Engines of one thread each, and a frontend for each policy, all of which know all engines."""
    make_checkpoint(model, _SHAPE, dtype=torch.float32, seed=0)
    for index in range(num_engines):
        place = (f"--data-parallel-rank={index}", f"--data-parallel-size={num_engines}")
        flags = (str(model), "--num-threads=1", "--max-num-batched-tokens=512", *place)
        fleet.add(ServicePlan("engine", index, flags))
    known = tuple(f"--engine={engine.address}" for engine in fleet.of("engine"))
    for index, policy in enumerate(_POLICIES):
        chosen = (*known, "--text-workers=1", f"--routing-policy={policy}")
        fleet.add(ServicePlan("frontend", index, chosen))
    await fleet.start()
    await fleet.until_routed()


async def _calibrate(channel: grpc.aio.Channel, options: argparse.Namespace) -> Pace:
    chance = random.Random(-1)
    medians = []
    for num_tokens in (LONG_TOKENS, SHORT_TOKENS):
        durations = []
        # Each engine once for warming, then some more times.
        for _ in range(options.engines + _NUM_CALIBRATIONS):
            started_at = time.monotonic()
            await _first_token(channel, Arrival(0.0, _prompt(chance, num_tokens)), "")
            durations.append(time.monotonic() - started_at)
        medians.append(sorted(durations[options.engines :])[_NUM_CALIBRATIONS // 2])
    long_s, short_s = medians
    interval_s = long_s / _LONG_EVERY / options.long_share
    work_s = (long_s + (_LONG_EVERY - 1) * short_s) / _LONG_EVERY
    return Pace(long_s, short_s, interval_s, work_s / interval_s / len(os.sched_getaffinity(0)))


def make_arrivals(num_requests: int, *, interval_s: float, seed: int) -> list[Arrival]:
    """Requests at random instants, so far apart on average, of which every eighth has a long prompt."""
    chance, at_s, arrivals = random.Random(seed), 0.0, []
    for index in range(num_requests):
        is_long = index % _LONG_EVERY == _LONG_EVERY - 1
        arrivals.append(Arrival(at_s, _prompt(chance, LONG_TOKENS if is_long else SHORT_TOKENS)))
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


def _row(policy: str, rounds: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> Row:
    times, ratios = _flat(rounds), _ratios(rounds, baseline)
    return {
        "policy": policy,
        "requests": len(times),
        "mean_ms": 1000 * sum(times) / len(times),
        "p50_ms": 1000 * _percentile(times, 0.5),
        "p90_ms": 1000 * _percentile(times, 0.9),
        "p99_ms": 1000 * _percentile(times, 0.99),
        "max_ms": 1000 * max(times),
        "p99_over_round_robin": _percentile(times, 0.99) / _percentile(_flat(baseline), 0.99),
        "lowest_of_a_round": min(ratios),
        "highest_of_a_round": max(ratios),
    }


def _ratios(rounds: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> list[float]:
    """The 99th percentile of each round beside that of the same round of the baseline."""
    return [
        _percentile(times, 0.99) / _percentile(others, 0.99)
        for times, others in zip(rounds, baseline, strict=True)
    ]


def _flat(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [time_s for one in rounds for time_s in one]


def _percentile(times: Sequence[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="of each policy")
    parser.add_argument("--requests", type=int, default=200, help="in a round")
    parser.add_argument("--long-share", type=float, default=1.1, help="of a core, that long prompts take")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
