"""Latency of one tenant alone and beside another that sends as much as it can.

    python -m benchmarks tenants --json benchmarks/results/tenants.json
    python -m benchmarks tenants --only schemas --rounds 1

A real engine with the embedded model under the policy `fair`, and a frontend with the keys of two tenants. In
turns alone and beside each load of the other tenant, one sends requests one after the other, each on a new
HTTP connection: a short prompt, a prompt in a schema that was not sent before, and a text of 18 kB to
tokenize. The other gives way to the stack, whose cores it shares. Promised: none is refused, and the 99th
percentile is at most twice that alone and one step more. A step is one of decodes (50 ms); beside costly
schemas, for a new schema, one check of these (5 s); beside open requests the three of a request (two in
flight when it comes, and its own), with prompts (250 ms each).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Report, Row, percentile, print_table
from benchmarks.rig.lines import LineProcess, module
from benchmarks.rig.processes import Fleet, ServicePlan
from benchmarks.rig.tenant_loads import LOADS, completion, exchange, new_schema, text
from triptych_cli.services import embedded_model

STEP_MS = 50.0
CHECK_MS = 5000.0
PROMPT_STEPS_MS = 3 * 250.0
_KEYS = {name: f"key-of-{name}-0123456789" for name in ("loud", "quiet")}
_LIMIT_S = 90.0
_WARM_S = 2.0
_PAUSE_S = 3.0
_POLL_S = 0.2
_TEXT_BYTES = 18 * 1024


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
    parser.add_argument("--rounds", type=int, default=3, help="turns alone and beside each load")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a turn beside; half as many alone")


def run(options: argparse.Namespace) -> Report:
    rows = asyncio.run(_measure(options.only, options.rounds, options.seconds))
    settings = {"rounds": options.rounds, "seconds": options.seconds}
    return Report("tenants", settings, rows, shortfalls(rows))


def shortfalls(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        name = f"{row['request']} beside {row['load']}"
        if row["refused"]:
            found.append(f"{name}: {row['refused']}")
        beside_ms, limit_ms = row["beside_p99_ms"], row["p99_at_most_ms"]
        assert isinstance(beside_ms, float)
        assert isinstance(limit_ms, float)
        if beside_ms > limit_ms:
            found.append(f"{name}: p99 is {beside_ms:.0f} ms, at most {limit_ms:.0f} is promised")
    return found


async def _measure(names: Sequence[str], num_rounds: int, seconds: float) -> list[Row]:
    rows: list[Row] = []
    numbers = itertools.count(1_000_000)
    async with _serving() as address:
        with LineProcess(
            module("benchmarks.rig.tenant_loads", f"--address={address}", f"--key={_KEYS['loud']}")
        ) as loud:
            await _window(address, _WARM_S, numbers)
            for name in names:
                alone = {probe: Window() for probe in PROBES}
                beside = {probe: Window() for probe in PROBES}
                sent: Counter[str] = Counter()
                for _ in range(num_rounds):
                    await _window(address, seconds / 2, numbers, alone)
                    await asyncio.to_thread(loud.ask, begin=name)
                    await _window(address, seconds, numbers, beside)
                    sent.update((await asyncio.to_thread(loud.ask, end=name))["statuses"])
                    await asyncio.sleep(_PAUSE_S)
                of_load = _in_words(sent)
                rows += [_row(name, probe, alone[probe], beside[probe], of_load) for probe in PROBES]
                print_table(rows[-len(PROBES) :])
    return rows


@dataclass(slots=True)
class Window:
    latencies_ms: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


def _row(load: str, probe: str, alone: Window, beside: Window, of_load: str) -> Row:
    alone_p99_ms = percentile(alone.latencies_ms, 99)
    return {
        "load": load,
        "request": probe,
        "alone": len(alone.latencies_ms),
        "alone_p50_ms": percentile(alone.latencies_ms, 50),
        "alone_p99_ms": alone_p99_ms,
        "beside": len(beside.latencies_ms),
        "beside_p50_ms": percentile(beside.latencies_ms, 50),
        "beside_p99_ms": percentile(beside.latencies_ms, 99),
        "p99_at_most_ms": 2 * alone_p99_ms + _step_ms(load, probe),
        "refused": _in_words(alone.refused + beside.refused),
        "of_load": of_load,
    }


def _step_ms(load: str, probe: str) -> float:
    if load == "open requests":
        return PROMPT_STEPS_MS
    return STEP_MS + CHECK_MS * ((load, probe) == ("schemas", "new schema"))


def _in_words(statuses: Counter[str]) -> str:
    return ", ".join(f"{count} {status}" for status, count in statuses.items())


async def _window(
    address: str, seconds: float, numbers: itertools.count[int], into: Mapping[str, Window] | None = None
) -> None:
    """The kinds of requests side by side, of each kind one after the other."""
    windows = {probe: Window() for probe in PROBES} if into is None else into
    until = time.perf_counter() + seconds
    await asyncio.gather(*(_send(address, PROBES[probe], until, numbers, windows[probe]) for probe in PROBES))


async def _send(
    address: str, probe: Probe, until: float, numbers: itertools.count[int], window: Window
) -> None:
    while (began_at := time.perf_counter()) < until:
        status = await exchange(
            address, _KEYS["quiet"], probe.path, probe.body(next(numbers)), limit_s=_LIMIT_S
        )
        window.latencies_ms.append(1000 * (time.perf_counter() - began_at))
        if status != "200":
            window.refused[status] += 1


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[str]:
    """The HTTP address of a frontend with an engine."""
    with tempfile.TemporaryDirectory() as folder:
        keys = _keys_file(Path(folder))
        async with Fleet(Path(folder)) as fleet:
            engine = fleet.add(
                ServicePlan(
                    "engine", 0, (str(embedded_model()), "--num-threads=1", "--scheduling-policy=fair")
                )
            )
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
