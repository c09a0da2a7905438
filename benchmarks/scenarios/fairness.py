"""What two accounts get of one engine, by their weights: time to the first token, and tokens.

    python -m benchmarks fairness --json benchmarks/results/fairness.json
    python -m benchmarks fairness --policy fcfs --open 600

A real engine with the embedded model and a frontend with the keys of two accounts, over gRPC. One keeps
`--open` requests of 200 tokens open; the other sends requests of 8 tokens one after the other, alone and
beside them. Then both keep as many open. Promised, under `fair`: tokens are by the weights within 5 %, and
the 99th percentile of the other's time to its first token is at most twice that alone and the steps that a
request takes: those in flight when it comes, and its own. A step is the median time between two tokens of the
other's streams beside the first's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from benchmarks.report import Report, Row, percentile
from benchmarks.rig.account_streams import Account, Stream
from benchmarks.rig.lines import LineProcess, module
from benchmarks.rig.processes import Fleet, ServicePlan
from triptych_cli.services import embedded_model

WEIGHTS = ((1, 1), (1, 3))
_TOKENS = 200
_PROBE_TOKENS = 8
_NUM_WARM = 5
_TOLERANCE = 0.05
_KEYS = {name: f"key-of-{name}-0123456789" for name in ("first", "other")}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default="fair", help="scheduling policy of the engine")
    parser.add_argument("--steps-in-flight", type=int, default=2, help="of the engine")
    parser.add_argument("--open", type=int, default=1400, help="requests that an account keeps open")
    parser.add_argument("--requests", type=int, default=100, help="of the other, alone and beside")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds before tokens are counted")
    parser.add_argument("--seconds", type=float, default=60.0, help="in which tokens are counted")


def run(options: argparse.Namespace) -> Report:
    rows = [asyncio.run(_measure(options, weights)) for weights in WEIGHTS]
    settings = {
        "policy": options.policy,
        "steps_in_flight": options.steps_in_flight,
        "open": options.open,
        "requests": options.requests,
        "settle_s": options.settle,
        "seconds": options.seconds,
        "tokens": _TOKENS,
    }
    return Report("fairness", settings, rows, shortfalls(rows) if options.policy == "fair" else [])


def shortfalls(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        weights, num_steps = row["weights"], 1 + _number(row, "steps_in_flight")
        limit_ms = 2 * _number(row, "alone_p99_ms") + num_steps * _number(row, "step_ms")
        if (beside_ms := _number(row, "beside_p99_ms")) > limit_ms:
            found.append(f"{weights}: p99 beside is {beside_ms:.0f} ms, at most {limit_ms:.0f} is promised")
        share, promised = _number(row, "share_of_other"), _number(row, "share_by_weight")
        if abs(share / promised - 1) > _TOLERANCE:
            found.append(f"{weights}: the other has {share:.3f} of the tokens, {promised:.3f} is promised")
        if row["refused"]:
            found.append(f"{weights}: {row['refused']}")
    return found


def _number(row: Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, int | float)
    return value


async def _measure(options: argparse.Namespace, weights: tuple[int, int]) -> Row:
    async with (
        _serving(options, weights) as address,
        Account(address, _KEYS["other"], seed=3) as account,
    ):
        with _keeper(address, "first", seed=1) as first, _keeper(address, "other", seed=2) as other:
            await _probe(account, _NUM_WARM)
            alone = await _probe(account, options.requests)
            await asyncio.to_thread(first.ask, keep=options.open)
            await asyncio.sleep(options.settle)
            beside = await _probe(account, options.requests)
            await asyncio.to_thread(other.ask, keep=options.open)
            await asyncio.sleep(options.settle)
            before = [await asyncio.to_thread(keeper.ask) for keeper in (first, other)]
            began_at = time.perf_counter()
            await asyncio.sleep(options.seconds)
            after = [await asyncio.to_thread(keeper.ask) for keeper in (first, other)]
            elapsed_s = time.perf_counter() - began_at
    tokens = [late["num_tokens"] - early["num_tokens"] for early, late in zip(before, after, strict=True)]
    return {
        "weights": f"{weights[0]}:{weights[1]}",
        "steps_in_flight": options.steps_in_flight,
        "alone_p50_ms": _first_ms(alone, 50),
        "alone_p99_ms": _first_ms(alone, 99),
        "beside_p50_ms": _first_ms(beside, 50),
        "beside_p99_ms": _first_ms(beside, 99),
        "step_ms": 1000 * statistics.median(gap for stream in beside for gap in stream.gaps_s),
        "tokens_per_s": sum(tokens) / elapsed_s,
        "share_of_other": tokens[1] / sum(tokens),
        "share_by_weight": weights[1] / sum(weights),
        "refused": "; ".join(sorted({text for counters in after for text in counters["refused"]})),
    }


def _first_ms(streams: Sequence[Stream], percent: int) -> float:
    return percentile([1000 * stream.first_s for stream in streams], percent)


async def _probe(account: Account, number: int) -> list[Stream]:
    return [await account.stream(_PROBE_TOKENS) for _ in range(number)]


def _keeper(address: str, name: str, *, seed: int) -> LineProcess:
    flags = (f"--address={address}", f"--key={_KEYS[name]}", f"--tokens={_TOKENS}", f"--seed={seed}")
    return LineProcess(module("benchmarks.rig.account_streams", *flags))


@contextlib.asynccontextmanager
async def _serving(options: argparse.Namespace, weights: tuple[int, int]) -> AsyncIterator[str]:
    """The gRPC address of a frontend with an engine."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(
            "".join(
                f"- {{name: {name}, tenant: {name}, key: {key}, role: client, weight: {weight}}}\n"
                for (name, key), weight in zip(_KEYS.items(), weights, strict=True)
            ),
            encoding="utf-8",
        )
        keys.chmod(0o600)
        async with Fleet(Path(folder)) as fleet:
            flags = (f"--scheduling-policy={options.policy}", f"--steps-in-flight={options.steps_in_flight}")
            engine = fleet.add(ServicePlan("engine", 0, (str(embedded_model()), "--num-threads=1", *flags)))
            limits = (f"--max-queued-requests={4 * options.open}", f"--admin-uds={folder}/admin.sock")
            frontend = fleet.add(
                ServicePlan("frontend", 0, (f"--engine={engine.address}", f"--api-keys={keys}", *limits))
            )
            await fleet.start()
            await fleet.until_routed()
            yield frontend.address
