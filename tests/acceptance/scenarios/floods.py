"""Peers without a key that flood each listener of a stack, beside the streams of a tenant.

    python -m tests.acceptance floods --json benchmarks/results/floods.json
    python -m tests.acceptance floods --listener frontend --only "rapid reset" --tls no --seconds 5

A coordinator, an engine with the embedded model and a frontend, each with TCP listeners and `--api-keys`,
with TLS and without. A tenant keeps 16 greedy streams open. For each flood quiet windows and windows with the
flood take turns, five times; the flood's windows take 30 s together. Promised, in each: the processes of the
service whose listener is flooded have at most 100 MB more memory, and what remains of it 10 s after the last
turn is at most 20 MB; no stream differs from an undisturbed run; the 99th percentile of the gaps between
tokens is, as the median of the turns, at most 50 ms longer than in the quiet windows.

One listener of each service is flooded at the same time, which is no easier for any of them: memory is that
of its own processes, gaps and streams are what all of them cost together. The peers share the cores with the
stack, at the lowest priority, with a process for each listener.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from benchmarks.report import Report, Row, percentile
from benchmarks.rig.frontend import with_descendants
from benchmarks.rig.history import Oracle
from benchmarks.rig.lines import LineProcess, module
from benchmarks.rig.processes import Fleet, ServicePlan, ServiceProcess
from benchmarks.rig.streams import FIRST_MARKER_ID, FIRST_PLAIN_ID, Case, Flow, Kind, Load
from tests.acceptance.rig.flood_peers import HTTP1, HTTP2
from tests.certificates import CertificateAuthority
from triptych.common.v1 import sampling_pb2
from triptych_cli.services import embedded_model
from triptych_kit.channel import ChannelCredentials, open_channel

NUM_STREAMS = 16
MAX_ADDED_MB = 100.0
MAX_KEPT_MB = 20.0
MAX_ADDED_MS = 50.0
_SERVICES = ("frontend", "engine", "coordinator")
# Those of one line are of different services, and are flooded at the same time.
_TOGETHER = (
    ("frontend", "engine", "coordinator"),
    ("frontend admin", "engine admin", "coordinator admin"),
    ("frontend http", "engine admin http", "coordinator admin http"),
    ("frontend admin http",),
)
LISTENERS = tuple(itertools.chain.from_iterable(_TOGETHER))
_NUM_TOKENS = 400
_NUM_BLOCKS = 600
_FIRST_QUIET_S, _QUIET_S = 4.0, 2.0
_RELEASE_S = 10.0
_POLL_S = 0.1
_LIMIT_S = 120.0
_MB = 2**20


def add_options(parser: argparse.ArgumentParser) -> None:
    floods = [*HTTP2, *(name for name in HTTP1 if name not in HTTP2)]
    parser.add_argument("--only", nargs="+", choices=floods, default=floods, metavar="FLOOD")
    parser.add_argument("--listener", nargs="+", choices=LISTENERS, default=list(LISTENERS))
    parser.add_argument("--tls", nargs="+", choices=("no", "yes"), default=["no", "yes"])
    parser.add_argument("--seconds", type=float, default=30.0, help="of a flood, in all turns")
    parser.add_argument(
        "--source", help="address of the peers; 127.0.0.1 is the tenant's; unset: each turn's own"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--max-added-ms", type=float, default=MAX_ADDED_MS, help="of the gaps of streams")


def run(options: argparse.Namespace) -> Report:
    rows = asyncio.run(_measure(options))
    settings = {
        "streams": NUM_STREAMS,
        "seconds": options.seconds,
        "turns": options.turns,
        "source": options.source or "of each turn its own",
        "peers": "at nice 19 on the cores of the stack",
        "at the same time": " | ".join(", ".join(_asked(together, options)) for together in _TOGETHER),
    }
    return Report("floods", settings, rows, shortfalls(rows, options.max_added_ms))


def shortfalls(rows: Sequence[Row], max_added_ms: float = MAX_ADDED_MS) -> list[str]:
    limits = {"added_mb": MAX_ADDED_MB, "kept_mb": MAX_KEPT_MB, "added_p99_ms": max_added_ms, "violations": 0}
    return [
        f"{row['flood']} at {row['listener']}, TLS {row['tls']}: {name} is {row[name]}, at most {limit} is "
        "promised"
        for row in rows
        for name, limit in limits.items()
        if float(str(row[name])) > limit
    ]


@dataclass(frozen=True, slots=True)
class _Target:
    """A listener, and the peers that flood it. ask: the flood that they are asked for."""

    listener: str
    service: ServiceProcess
    peers: LineProcess
    ask: dict[str, object]


def _asked(listeners: Sequence[str], options: argparse.Namespace) -> list[str]:
    return [listener for listener in listeners if listener in options.listener]


def _is_http1(listener: str) -> bool:
    return listener.endswith("http")


class _Stack:
    """A stack whose listeners need keys, and the streams of its tenant."""

    def __init__(self, fleet: Fleet, channel: grpc.aio.Channel) -> None:
        self._fleet = fleet
        self.channel = channel

    def target(self, listener: str, peers: LineProcess, ask: dict[str, object]) -> _Target:
        role, _, kind = listener.partition(" ")
        service = self._fleet[f"{role}-0"]
        addresses = {
            "": service.address,
            "admin": service.admin_address,
            "http": service.http,
            "admin http": service.admin_http,
        }
        asked = {**ask, "address": addresses[kind], "http2": not _is_http1(listener)}
        return _Target(listener, service, peers, asked)


async def _measure(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    cases = _cases()
    with contextlib.ExitStack() as opened:
        processes = [
            opened.enter_context(LineProcess(module("tests.acceptance.rig.flood_peers"))) for _ in _SERVICES
        ]
        for tls, together, flood in itertools.product(options.tls, _TOGETHER, options.only):
            listeners = [
                each for each in _asked(together, options) if flood in (HTTP1 if _is_http1(each) else HTTP2)
            ]
            if not listeners:
                continue
            # Each has its own stack: memory that one flood leaves would hide that of the next.
            async with _serving(has_tls=tls == "yes") as stack:
                undisturbed = Load(label="undisturbed")
                undisturbed.send(stack.channel, cases)
                oracle = Oracle(await undisturbed.finish())
                seconds = options.seconds / options.turns
                ask: dict[str, object] = {"flood": flood, "has_tls": tls == "yes", "seconds": seconds}
                targets = [
                    stack.target(listener, peers, ask)
                    for listener, peers in zip(listeners, processes, strict=False)
                ]
                flow = Flow(stack.channel, cases, "legal")
                measured = await _flooded(targets, flow, options)
                violations = oracle.violations(flow.load.records)
                common: dict[str, str | int] = {
                    "streams": len(flow.load.records),
                    "violations": len(violations),
                    "first_violation": str(violations[0]) if violations else "",
                }
                for target, row in zip(targets, measured, strict=True):
                    rows.append({"listener": target.listener, "tls": tls, "flood": flood, **row, **common})
                    print(rows[-1], file=sys.stderr, flush=True)
    return rows


async def _flooded(targets: Sequence[_Target], flow: Flow, options: argparse.Namespace) -> list[Row]:
    """Memory and gaps in the turns of one flood, by target."""
    did = [Counter[str]() for _ in targets]
    quiet_ms, flooded_ms = [], []
    async with flow.running(NUM_STREAMS, between_starts_s=0.2, finds_engines=False):
        await asyncio.sleep(_FIRST_QUIET_S)
        before = await asyncio.to_thread(_rss_of, targets)
        most = _Most(targets)
        async with most.watching():
            for turn in range(options.turns):
                quiet_ms.append(await _p99_ms(flow.load.records, asyncio.sleep(_QUIET_S)))
                # An address that was dropped in one turn would be in the next one.
                source = options.source or f"127.0.0.{2 + turn}"
                floods = asyncio.gather(
                    *(asyncio.to_thread(each.peers.ask, **each.ask, source=source) for each in targets)
                )
                flooded_ms.append(await _p99_ms(flow.load.records, floods))
                for counts, answer in zip(did, floods.result(), strict=True):
                    counts.update(answer)
        await asyncio.sleep(_RELEASE_S)
        after = await asyncio.to_thread(_rss_of, targets)
    added_ms = statistics.median(b - a for a, b in zip(quiet_ms, flooded_ms, strict=True))
    return [
        {
            "before_mb": round(before[index], 1),
            "added_mb": round(most.rss_mb[index] - before[index], 1),
            "kept_mb": round(after[index] - before[index], 1),
            "quiet_p99_ms": round(statistics.median(quiet_ms), 1),
            "added_p99_ms": round(added_ms, 1),
            "did": ", ".join(f"{name} {count}" for name, count in sorted(did[index].items())),
        }
        for index in range(len(targets))
    ]


async def _p99_ms(records, during) -> float:
    """The 99th percentile of the gaps that ended while `during` was awaited."""
    since = time.monotonic()
    await during
    now = time.monotonic()
    gaps = []
    for record in records:
        at = record.token_instants
        gaps += [b - a for a, b in itertools.pairwise(at) if b > since]
        if record.ended_at is None and at:
            gaps.append(now - at[-1])
    return 1000 * percentile(gaps, 99)


class _Most:
    """The largest memory of the processes of each target's service."""

    def __init__(self, targets: Sequence[_Target]) -> None:
        self.rss_mb = [0.0] * len(targets)
        self._targets = targets

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        watch = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait([watch])

    async def _watch(self) -> None:
        while True:
            self.rss_mb = list(map(max, self.rss_mb, await asyncio.to_thread(_rss_of, self._targets)))
            await asyncio.sleep(_POLL_S)


def _rss_of(targets: Sequence[_Target]) -> list[float]:
    return [_rss_mb(target.service) for target in targets]


def _rss_mb(service: ServiceProcess) -> float:
    return sum(_rss_bytes(pid) for pid in with_descendants(service.pid)) / _MB


def _rss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def _cases() -> list[Case]:
    rng = random.Random(1)
    sampling = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    return [
        Case(
            key,
            Kind.GREEDY,
            tuple(rng.randrange(FIRST_PLAIN_ID, FIRST_MARKER_ID) for _ in range(32)),
            sampling,
        )
        for key in range(NUM_STREAMS)
    ]


@contextlib.asynccontextmanager
async def _serving(*, has_tls: bool) -> AsyncIterator[_Stack]:
    with tempfile.TemporaryDirectory(prefix="triptych-") as name:
        folder = Path(name)
        keys = {role: f"triptych-key-of-the-{role}" for role in (*_SERVICES, "client")}
        entries = [f"- {{name: {role}, role: {role}, key: {key}}}\n" for role, key in keys.items()]
        _private(folder / "keys.yaml", "".join(entries))
        for role, key in keys.items():
            _private(folder / f"{role}.key", key)
        flags = [f"--api-keys={folder / 'keys.yaml'}"]
        ca = None
        if has_tls:
            files = CertificateAuthority(folder).issue("service")
            ca = files.ca
            flags += [f"--ssl-certfile={files.certificate}", f"--ssl-keyfile={files.key}"]
        own = {
            role: [
                *flags,
                f"--peer-api-key-file={folder / role}.key",
                *([f"--peer-ca-certs={ca}"] if ca else []),
            ]
            for role in _SERVICES
        }
        async with Fleet(folder) as fleet:
            coordinator = fleet.add(ServicePlan("coordinator", 0, tuple(flags)))
            known = f"--coordinator={coordinator.address}"
            # Few blocks, which the undisturbed run has used: the memory of a CPU's cache grows with its use.
            cache = f"--num-kv-blocks={_NUM_BLOCKS}"
            engine = (str(embedded_model()), known, "--num-threads=1", cache, *own["engine"])
            fleet.add(ServicePlan("engine", 0, engine))
            frontend = fleet.add(
                ServicePlan("frontend", 0, (known, "--http-port=0", "--text-workers=1", *own["frontend"]))
            )
            for process in fleet.processes.values():
                await process.start()
            credentials = ChannelCredentials(ca=ca, api_key=keys["client"])
            async with open_channel(frontend.address, profile="public", credentials=credentials) as channel:
                await _until_served(channel)
                yield _Stack(fleet, channel)


def _private(file: Path, content: str) -> None:
    file.write_text(content, encoding="utf-8")
    file.chmod(0o600)


async def _until_served(channel: grpc.aio.Channel) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while True:
            load = Load(label=f"first-{time.monotonic():.1f}")
            [record] = load.send(channel, _cases()[:1])
            await load.ended(record)
            if record.code is grpc.StatusCode.OK:
                return
            await asyncio.sleep(_POLL_S)
