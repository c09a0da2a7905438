"""What two accounts get of engines, by their weights: time to the first token, and tokens.

    python -m benchmarks fairness --json benchmarks/results/fairness.json
    python -m benchmarks fairness --cases 1:1 --policy fcfs

Real engines with the embedded model and a frontend with the keys of two accounts, over gRPC. In turns, the
other account sends requests of 8 tokens one after the other alone, and beside requests of 200 tokens that the
first keeps open, once all of them have begun. Then both keep as many open. What the other sends while those
of the first arrive, all at once, is counted apart (`burst`): until it is known whose they are, calls wait in
gRPC's queue in the order of their arrival. Promised, under `fair`:

- tokens are by the weights within 5 %;
- the median of the other's time to its first token is at most 1 s;
- the 99th percentile of the other's time to its first token is at most twice that alone and the steps that a
  request takes: those in flight when it comes, and its own. A step is the 99th percentile of the time between
  two tokens of the other's streams beside the first's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Report, Row, percentile, print_table
from benchmarks.rig.account_streams import Account, Stream
from benchmarks.rig.lines import LineProcess, module
from benchmarks.rig.processes import Fleet, ServicePlan
from triptych_cli.services import embedded_model

_TOKENS = 200
_PROBE_TOKENS = 8
_NUM_WARM = 5
_END_S = 2.0  # until requests that are cancelled have ended
_BEGIN_LIMIT_S = 120.0
_POLL_S = 0.2
_BURST_S = 1.0  # after which the calls that were sent at once are arriving
_TOLERANCE = 0.05
_MAX_P50_MS = 1000.0
_KEYS = {name: f"key-of-{name}-0123456789" for name in ("first", "other")}


@dataclass(frozen=True, slots=True)
class Case:
    """weights: of the first account and the other.  num_open: requests that an account keeps open."""

    weights: tuple[int, int]
    num_open: int
    num_engines: int = 1


CASES = {
    "1:1": Case((1, 1), 1400),
    "1:3": Case((1, 3), 1400),
    "two engines": Case((1, 1), 600, num_engines=2),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--policy", default="fair", help="scheduling policy of the engines")
    parser.add_argument("--steps-in-flight", type=int, default=2, help="of the engines")
    parser.add_argument("--rounds", type=int, default=4, help="turns alone and beside the first account")
    parser.add_argument("--requests", type=int, default=25, help="of the other, in each turn")
    parser.add_argument("--settle", type=float, default=8.0, help="seconds for which a load runs unmeasured")
    parser.add_argument("--seconds", type=float, default=40.0, help="in which tokens are counted")


def run(options: argparse.Namespace) -> Report:
    rows = []
    for name in options.cases:
        rows.append(asyncio.run(_measure(options, name, CASES[name])))
        print_table(rows[-1:])
    settings = {
        "policy": options.policy,
        "rounds": options.rounds,
        "requests": options.requests,
        "settle_s": options.settle,
        "seconds": options.seconds,
        "tokens": _TOKENS,
    }
    return Report("fairness", settings, rows, shortfalls(rows) if options.policy == "fair" else [])


def shortfalls(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        case, beside_ms, limit_ms = row["case"], _number(row, "beside_p99_ms"), _number(row, "p99_at_most_ms")
        if beside_ms > limit_ms:
            found.append(f"{case}: p99 beside is {beside_ms:.0f} ms, at most {limit_ms:.0f} is promised")
        if (p50_ms := _number(row, "beside_p50_ms")) > _MAX_P50_MS:
            found.append(f"{case}: p50 beside is {p50_ms:.0f} ms, at most {_MAX_P50_MS:.0f} is promised")
        share, promised = _number(row, "share_of_other"), _number(row, "share_by_weight")
        if abs(share / promised - 1) > _TOLERANCE:
            found.append(f"{case}: the other has {share:.3f} of the tokens, {promised:.3f} is promised")
        if row["refused"]:
            found.append(f"{case}: {row['refused']}")
    return found


def _number(row: Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, int | float)
    return value


async def _measure(options: argparse.Namespace, name: str, case: Case) -> Row:
    alone: list[Stream] = []
    burst: list[Stream] = []
    beside: list[Stream] = []
    async with _serving(options, case) as address, Account(address, _KEYS["other"], seed=3) as account:
        with _keeper(address, "first", seed=1) as first, _keeper(address, "other", seed=2) as other:
            await _probe(account, _NUM_WARM)
            for _ in range(options.rounds):
                alone += await _probe(account, options.requests)
                await asyncio.to_thread(first.ask, keep=case.num_open)
                await asyncio.sleep(_BURST_S)
                burst += await _probe(account, 1)
                await _until_begun(first, case.num_open)
                await asyncio.sleep(options.settle)
                beside += await _probe(account, options.requests)
                await asyncio.to_thread(first.ask, keep=0)
                await asyncio.sleep(_END_S)
            for keeper in (first, other):
                await asyncio.to_thread(keeper.ask, keep=case.num_open)
            for keeper in (first, other):
                await _until_begun(keeper, case.num_open)
            await asyncio.sleep(options.settle)
            before = [await asyncio.to_thread(keeper.ask) for keeper in (first, other)]
            began_at = time.perf_counter()
            await asyncio.sleep(options.seconds)
            after = [await asyncio.to_thread(keeper.ask) for keeper in (first, other)]
            elapsed_s = time.perf_counter() - began_at
    tokens = [late["num_tokens"] - early["num_tokens"] for early, late in zip(before, after, strict=True)]
    alone_p99_ms = _first_ms(alone, 99)
    step_ms = percentile([1000 * gap for stream in beside for gap in stream.gaps_s], 99)
    return {
        "case": name,
        "engines": case.num_engines,
        "open": case.num_open,
        "alone_p50_ms": _first_ms(alone, 50),
        "alone_p99_ms": alone_p99_ms,
        "beside_p50_ms": _first_ms(beside, 50),
        "beside_p99_ms": _first_ms(beside, 99),
        "burst_p50_ms": _first_ms(burst, 50),
        "p99_at_most_ms": 2 * alone_p99_ms + (1 + options.steps_in_flight) * step_ms,
        "step_p50_ms": percentile([1000 * gap for stream in beside for gap in stream.gaps_s], 50),
        "step_p99_ms": step_ms,
        "steps_in_flight": options.steps_in_flight,
        "tokens_per_s": sum(tokens) / elapsed_s,
        "share_of_other": tokens[1] / sum(tokens),
        "share_by_weight": case.weights[1] / sum(case.weights),
        "refused": "; ".join(sorted({text for counters in after for text in counters["refused"]})),
    }


async def _until_begun(keeper: LineProcess, number: int) -> None:
    """Wait until the server has answered so many calls. Raises TimeoutError."""
    async with asyncio.timeout(_BEGIN_LIMIT_S):
        # A process has no event to wait for.
        while (await asyncio.to_thread(keeper.ask))["num_begun"] < number:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


def _first_ms(streams: Sequence[Stream], percent: int) -> float:
    return percentile([1000 * stream.first_s for stream in streams], percent)


async def _probe(account: Account, number: int) -> list[Stream]:
    return [await account.stream(_PROBE_TOKENS) for _ in range(number)]


def _keeper(address: str, name: str, *, seed: int) -> LineProcess:
    flags = (f"--address={address}", f"--key={_KEYS[name]}", f"--tokens={_TOKENS}", f"--seed={seed}")
    return LineProcess(module("benchmarks.rig.account_streams", *flags))


@contextlib.asynccontextmanager
async def _serving(options: argparse.Namespace, case: Case) -> AsyncIterator[str]:
    """The gRPC address of a frontend with engines."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(
            "".join(
                f"- {{name: {name}, tenant: {name}, key: {key}, role: client, weight: {weight}}}\n"
                for (name, key), weight in zip(_KEYS.items(), case.weights, strict=True)
            ),
            encoding="utf-8",
        )
        keys.chmod(0o600)
        async with Fleet(Path(folder)) as fleet:
            flags = (f"--scheduling-policy={options.policy}", f"--steps-in-flight={options.steps_in_flight}")
            engines = [
                fleet.add(
                    ServicePlan("engine", index, (str(embedded_model()), "--num-threads=1", *flags))
                ).address
                for index in range(case.num_engines)
            ]
            limits = (f"--max-queued-requests={4 * case.num_open}", f"--admin-uds={folder}/admin.sock")
            frontend = fleet.add(
                ServicePlan(
                    "frontend", 0, (*(f"--engine={one}" for one in engines), f"--api-keys={keys}", *limits)
                )
            )
            await fleet.start()
            await fleet.until_routed()
            yield frontend.address
