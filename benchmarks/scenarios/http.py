"""What HTTP, keys and TLS cost: equal streams over each in turns, one frontend process each.

    python -m benchmarks http --json benchmarks/results/http.json

`frontend`: frontends over a synthetic engine at a set rate, so that the frontend is what is measured.
`stack`: the embedded model as fast as it goes, its frontend at it over TCP, over a unix socket and with TLS
on both sides. A mode is a protocol with its credentials; modes take turns in each round, and each round
begins with another one. Every stream's text is compared with its ids, and in `stack` the ids of all modes
with each other.

CPU is that of the frontend's process once all streams have begun. HTTP has a connection a stream, gRPC 8
in all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import Report, Row, median_interval
from benchmarks.rig.frontend import service, synthetic_engine
from benchmarks.rig.lines import Line, LineProcess, module
from benchmarks.rig.stream_clients import Load
from triptych_cli.services import embedded_model
from triptych_kit.process.child import Announcement

_PARTS = ("frontend", "stack")
_BASE = "gRPC"
_KEY = "a-key-of-the-benchmark"
_READY_LIMIT_S = 20.0
_RETRY_S = 0.5
_ENGINE_FLAGS = (
    str(embedded_model()), "--num-threads=1", "--max-num-seqs=128", "--kv-cache-memory=512MiB",
    "--log-level=error",
)  # fmt: skip
# Promised at most: CPU a token at 256 streams as a ratio to gRPC's; tokens a second at 64, lost to mTLS.
_MAX_HTTP_RATIO = 1.3
_MAX_TLS_LOSS = 0.05
_NUM_STACK_STREAMS = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="of the part frontend")
    parser.add_argument("--rounds", type=int, default=6, help="of the part frontend")
    parser.add_argument("--stack-rounds", type=int, default=20, help="which are shorter")
    parser.add_argument("--tokens", type=int, default=60, help="of a stream")
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second and stream")


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder))
        if "frontend" in options.parts:
            rows += asyncio.run(measure_frontends(options, files))
        if "stack" in options.parts:
            rows += asyncio.run(measure_stacks(options, files))
    settings = {name: getattr(options, name) for name in ("rounds", "stack_rounds", "tokens", "rate")}
    return Report("http", settings, rows, shortfalls(rows))


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """The promises that the whole interval of 95 % falls short of."""
    found = []
    for row in rows:
        label = f"{row['part']}: {row['mode']} at {row['streams']} streams"
        low_cpu, high_rate = row["cpu_ratio_low"], row["tokens_ratio_high"]
        assert isinstance(low_cpu, float) and isinstance(high_rate, float)
        if (row["part"], row["mode"], row["streams"]) == (
            "frontend",
            "HTTP",
            256,
        ) and low_cpu > _MAX_HTTP_RATIO:
            what = f"{row['cpu_ratio']:.2f} times gRPC's CPU"
            found.append(f"{label} takes {what}, at most {_MAX_HTTP_RATIO:g} is promised")
        if (row["part"], row["mode"]) == ("stack", "gRPC, mTLS") and high_rate < 1 - _MAX_TLS_LOSS:
            what = f"{row['tokens_ratio']:.2f} of the tokens a second"
            found.append(f"{label} has {what}, {1 - _MAX_TLS_LOSS:g} are promised")
    return found


class Files:
    """Sockets, and certificates of a CA of its own that openssl makes, one for each role."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ca, self._ca_key = str(folder / "ca.pem"), str(folder / "ca.key")
        self._openssl("-subj", "/CN=ca", "-keyout", self._ca_key, "-out", self._ca)
        for role in ("engine", "frontend", "client"):
            certificate, key = self._of(role)
            names = f"subjectAltName=DNS:localhost,IP:127.0.0.1,URI:spiffe://benchmark/{role}/0"
            words = ("-addext", names, "-addext", "basicConstraints=CA:FALSE", "-keyout", key)
            signer = ("-CA", self._ca, "-CAkey", self._ca_key)
            self._openssl("-subj", f"/CN={role}", *words, *signer, "-out", certificate)

    def listener_flags(self, role: str) -> tuple[str, ...]:
        certificate, key = self._of(role)
        return (f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}", f"--ssl-ca-certs={self._ca}")

    def peer_flags(self, role: str) -> tuple[str, ...]:
        certificate, key = self._of(role)
        return (f"--peer-certfile={certificate}", f"--peer-keyfile={key}", f"--peer-ca-certs={self._ca}")

    def of_client(self) -> dict[str, str]:
        certificate, key = self._of("client")
        return {"ca": self._ca, "certificate": certificate, "certificate_key": key}

    def _of(self, role: str) -> tuple[str, str]:
        return str(self.folder / f"{role}.pem"), str(self.folder / f"{role}.key")

    @staticmethod
    def _openssl(*words: str) -> None:
        made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        subprocess.run((*made, "-days", "3", *words), check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Mode:
    """A protocol with its credentials, at one server. pids: the processes whose CPU is counted."""

    name: str
    protocol: str
    address: str
    pids: Sequence[int]
    credentials: Mapping[str, str]

    @classmethod
    def at(cls, frontend: Announcement, name: str, protocol: str, credentials: Mapping[str, str]) -> Mode:
        address = frontend.address if protocol == "grpc" else frontend.http
        return cls(name, protocol, address, [frontend.pid], credentials)

    def load(self, num_streams: int, num_tokens: int) -> Load:
        return Load(self.protocol, self.address, list(self.pids), num_streams, num_tokens, **self.credentials)


async def measure_frontends(options: argparse.Namespace, files: Files) -> list[Row]:
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(synthetic_engine(options.rate))
        plain, keyed, secure = [
            await stack.enter_async_context(service("frontend", _frontend_flags(engine, *flags), environment))
            for flags, environment in (
                ((), {}),
                ((), {"TRIPTYCH_API_KEY": _KEY}),
                (files.listener_flags("frontend"), {}),
            )
        ]
        modes = [
            Mode.at(plain, _BASE, "grpc", {}),
            Mode.at(keyed, "gRPC, key", "grpc", {"key": _KEY}),
            Mode.at(secure, "gRPC, mTLS", "grpc", files.of_client()),
            Mode.at(plain, "HTTP", "http", {}),
            Mode.at(keyed, "HTTP, key", "http", {"key": _KEY}),
            Mode.at(secure, "HTTPS, mTLS", "http", files.of_client()),
        ]
        rows: list[Row] = []
        for num_streams in options.streams:
            turns = await in_turns(modes, num_streams, options.rounds, options.tokens)
            rows += rows_of("frontend", num_streams, turns)
    return rows


async def measure_stacks(options: argparse.Namespace, files: Files) -> list[Row]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            engine_flags: tuple[str, ...], target: Callable[[Announcement], str], *flags: str
        ) -> Announcement:
            flags_of_engine = (*_ENGINE_FLAGS, *engine_flags)
            engine = await stack.enter_async_context(service("engine", flags_of_engine))
            return await stack.enter_async_context(
                service("frontend", _frontend_flags(target(engine), *flags))
            )

        uds = files.folder / "engine.sock"
        plain = await start(("--port=0",), lambda engine: engine.address)
        local = await start((f"--uds={uds}",), lambda engine: f"unix:{uds}")
        secure = await start(
            ("--port=0", *files.listener_flags("engine")),
            lambda engine: engine.address,
            *files.listener_flags("frontend"),
            *files.peer_flags("frontend"),
        )
        modes = [
            Mode.at(plain, _BASE, "grpc", {}),
            Mode.at(local, "gRPC, engine at a unix socket", "grpc", {}),
            Mode.at(secure, "gRPC, mTLS", "grpc", files.of_client()),
            Mode.at(plain, "HTTP", "http", {}),
            Mode.at(secure, "HTTPS, mTLS", "http", files.of_client()),
        ]
        turns = await in_turns(modes, _NUM_STACK_STREAMS, options.stack_rounds, options.tokens)
    digests = {turn["digest"] for of_mode in turns.values() for turn in of_mode}
    if len(digests) > 1:
        raise RuntimeError(f"the same prompts were answered in {len(digests)} ways")
    return rows_of("stack", _NUM_STACK_STREAMS, turns)


def _frontend_flags(engine: str, *flags: str) -> tuple[str, ...]:
    ports = ("--port=0", "--http-port=0", "--text-workers=1")
    return (*ports, f"--engine={engine}", "--log-level=error", *flags)


async def in_turns(
    modes: Sequence[Mode],
    num_streams: int,
    num_rounds: int,
    num_tokens: int,
    turn_of: Callable[[Mode], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> dict[str, list[Line]]:
    """What the streams of each mode measured in each round. Raises RuntimeError where one fails.

    turn_of: what is around each turn.
    """
    turns: dict[str, list[Line]] = {mode.name: [] for mode in modes}
    with LineProcess(module("benchmarks.rig.stream_clients")) as process:
        for mode in modes:
            await _until_served(process, mode)
        for index in range(num_rounds):
            start = index % len(modes)
            for mode in [*modes[start:], *modes[:start]]:
                load = mode.load(num_streams, num_tokens)
                with turn_of(mode):
                    measured = await asyncio.to_thread(process.ask, **asdict(load))
                if "failure" in measured:
                    raise RuntimeError(f"{mode.name}: {measured['failure']}")
                turns[mode.name].append(measured | {"load": os.getloadavg()[0]})
    return turns


async def _until_served(process: LineProcess, mode: Mode) -> None:
    deadline = time.monotonic() + _READY_LIMIT_S
    while "failure" in (answer := await asyncio.to_thread(process.ask, **asdict(mode.load(8, 2)))):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{mode.name} is not served: {answer['failure']}")
        await asyncio.sleep(_RETRY_S)


def rows_of(part: str, num_streams: int, turns: Mapping[str, Sequence[Line]]) -> list[Row]:
    """Medians over rounds; ratios are to the first mode's turn of the same round, with 95 % intervals."""
    rows: list[Row] = []
    base_turns = next(iter(turns.values()))
    for mode, measured in turns.items():
        first = [sorted(turn["first_token_s"]) for turn in measured]
        pairs = list(zip(measured, base_turns, strict=True))
        cpu = median_interval([_cpu_us(turn) / _cpu_us(base) for turn, base in pairs])
        rate = median_interval([_tokens_per_s(turn) / _tokens_per_s(base) for turn, base in pairs])
        rows.append(
            {
                "part": part,
                "streams": num_streams,
                "mode": mode,
                "tokens_per_s": _median(measured, _tokens_per_s),
                "ttft_p50_ms": 1e3 * statistics.median(each[len(each) // 2] for each in first),
                "ttft_p99_ms": 1e3 * statistics.median(each[int(len(each) * 0.99)] for each in first),
                "itl_p99_ms": 1e3 * _median(measured, lambda turn: turn["gap_p99_s"]),
                "cpu_us_per_token": _median(measured, _cpu_us),
                "cpu_least": min(map(_cpu_us, measured)),
                "cpu_most": max(map(_cpu_us, measured)),
                "cpu_ratio": cpu.estimate,
                "cpu_ratio_low": cpu.low,
                "cpu_ratio_high": cpu.high,
                "tokens_ratio": rate.estimate,
                "tokens_ratio_low": rate.low,
                "tokens_ratio_high": rate.high,
                "tokens_per_message": _median(
                    measured, lambda turn: turn["num_tokens"] / turn["num_messages"]
                ),
                "load_average": _median(measured, lambda turn: turn["load"]),
            }
        )
    return rows


def _median(turns: Sequence[Line], value: Callable[[Line], float]) -> float:
    return statistics.median(map(value, turns))


def _cpu_us(turn: Line) -> float:
    return float(1e6 * turn["window_cpu_s"] / turn["window_tokens"])


def _tokens_per_s(turn: Line) -> float:
    return float(turn["num_tokens"] / turn["seconds"])
