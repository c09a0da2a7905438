"""Latency of one tenant alone and beside another that sends as much as it can.

    python -m benchmarks tenants --json benchmarks/results/tenants.json
    python -m benchmarks tenants --only schemas --requests 10

A real engine with the embedded model and a frontend with the keys of two tenants. Alone and beside each load
of the other tenant, one sends requests one after the other, each on a new HTTP connection: a short prompt, a
prompt in a schema that was not sent before, and a text of 18 kB to tokenize. Promised: none is refused, and
the 99th percentile is at most twice that alone and a step of 50 ms, for a new schema beside costly ones one
check of these (5 s) more. Beside open requests the engine decides about latency, and refusals alone count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Report, Row, percentile
from benchmarks.rig.lines import LineProcess, module
from benchmarks.rig.processes import Fleet, ServicePlan
from benchmarks.rig.tenant_loads import LOADS, completion, exchange, new_schema, text
from triptych_cli.services import embedded_model

NUM_REQUESTS = 30
STEP_MS = 50.0
CHECK_MS = 5000.0
_KEYS = {name: f"key-of-{name}-0123456789" for name in ("loud", "quiet")}
_LIMIT_S = 90.0
_PAUSE_S = 3.0
_POLL_S = 0.2
_TEXT_BYTES = 18 * 1024
_DECIDED_BY_ENGINE = "open requests"


@dataclass(frozen=True, slots=True)
class Probe:
    path: str
    body: Callable[[int], bytes]


PROBES = {
    "short": Probe("/v1/completions", completion),
    "new schema": Probe("/v1/completions", new_schema),
    "18 kB": Probe("/tokenize", text(_TEXT_BYTES)),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(LOADS), default=list(LOADS), metavar="LOAD")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="of each kind in each window")


def run(options: argparse.Namespace) -> Report:
    rows = asyncio.run(_measure(options.only, options.requests))
    settings = {"requests": options.requests, "step_ms": STEP_MS, "check_ms": CHECK_MS}
    return Report("tenants", settings, rows, shortfalls(rows))


def shortfalls(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        name = f"{row['request']} beside {row['load']}"
        if row["refused"]:
            found.append(f"{name}: {row['refused']}")
        alone_ms, beside_ms = row["alone_p99_ms"], row["beside_p99_ms"]
        assert isinstance(alone_ms, float)
        assert isinstance(beside_ms, float)
        limit_ms = 2 * alone_ms + STEP_MS
        if (row["load"], row["request"]) == ("schemas", "new schema"):
            limit_ms += CHECK_MS
        if row["load"] != _DECIDED_BY_ENGINE and beside_ms > limit_ms:
            found.append(f"{name}: p99 is {beside_ms:.0f} ms, at most {limit_ms:.0f} is promised")
    return found


async def _measure(names: Sequence[str], num_requests: int) -> list[Row]:
    rows: list[Row] = []
    numbers = itertools.count(1_000_000)
    async with _serving() as address:
        with LineProcess(
            module("benchmarks.rig.tenant_loads", f"--address={address}", f"--key={_KEYS['loud']}")
        ) as loud:
            await _window(address, 3, numbers)
            for name in names:
                alone = await _window(address, num_requests, numbers)
                await asyncio.to_thread(loud.ask, begin=name)
                beside = await _window(address, num_requests, numbers)
                ended = await asyncio.to_thread(loud.ask, end=name)
                sent = ", ".join(f"{count} {status}" for status, count in ended["statuses"].items())
                rows += [_row(name, probe, alone[probe], beside[probe], sent) for probe in PROBES]
                for row in rows[-len(PROBES) :]:
                    print(row, flush=True)
                await asyncio.sleep(_PAUSE_S)
    return rows


@dataclass(frozen=True, slots=True)
class Window:
    latencies_ms: list[float]
    refused: str


def _row(load: str, probe: str, alone: Window, beside: Window, sent: str) -> Row:
    return {
        "load": load,
        "request": probe,
        "alone_p50_ms": percentile(alone.latencies_ms, 50),
        "alone_p99_ms": percentile(alone.latencies_ms, 99),
        "beside_p50_ms": percentile(beside.latencies_ms, 50),
        "beside_p99_ms": percentile(beside.latencies_ms, 99),
        "refused": ", ".join(filter(None, [alone.refused, beside.refused])),
        "of_load": sent,
    }


async def _window(address: str, num_requests: int, numbers: itertools.count[int]) -> dict[str, Window]:
    """The kinds of requests side by side, of each kind one after the other."""
    windows = await asyncio.gather(*(_sent(address, each, num_requests, numbers) for each in PROBES.values()))
    return dict(zip(PROBES, windows, strict=True))


async def _sent(address: str, probe: Probe, num_requests: int, numbers: itertools.count[int]) -> Window:
    latencies_ms: list[float] = []
    refused: Counter[str] = Counter()
    for _ in range(num_requests):
        body = probe.body(next(numbers))
        began_at = time.perf_counter()
        status = await exchange(address, _KEYS["quiet"], probe.path, body, limit_s=_LIMIT_S)
        latencies_ms.append(1000 * (time.perf_counter() - began_at))
        if status != "200":
            refused[status] += 1
    return Window(latencies_ms, ", ".join(f"{count} {status}" for status, count in refused.items()))


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[str]:
    """The HTTP address of a frontend with an engine."""
    with tempfile.TemporaryDirectory() as folder:
        keys = _keys_file(Path(folder))
        async with Fleet(Path(folder)) as fleet:
            engine = fleet.add(ServicePlan("engine", 0, (str(embedded_model()), "--num-threads=1")))
            flags = (f"--engine={engine.address}", "--http-port=0", f"--api-keys={keys}")
            frontend = fleet.add(ServicePlan("frontend", 0, (*flags, "--text-workers=2", "--drain-lag-s=0")))
            await fleet.start()
            # Its admin listener needs a key, too.
            async with asyncio.timeout(_LIMIT_S):
                while not await _is_served(frontend.http):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
            yield frontend.http


async def _is_served(address: str) -> bool:
    return await exchange(address, _KEYS["quiet"], "/v1/completions", completion(0)) == "200"


def _keys_file(folder: Path) -> Path:
    entries = [f"- {{name: {name}, key: {key}, role: client}}\n" for name, key in _KEYS.items()]
    file = folder / "keys.yaml"
    file.write_text("".join(entries), encoding="utf-8")
    file.chmod(0o600)
    return file
