"""Gaps of streams beside hostile messages of the largest size that a frontend reads.

    python -m benchmarks hostile --json benchmarks/results/hostile.json
    python -m benchmarks hostile --only "deep JSON" --rounds 1

A real frontend has 32 streams of a synthetic engine. For each message quiet and loaded windows take turns; in
a loaded one another process sends the message three times, one after the other. Promised: the longest gap
between two deltas of a stream, as the median of five windows, is at most 50 ms longer than in quiet ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from benchmarks.report import Report, Row, percentile
from benchmarks.rig.frontend import frontend, synthetic_engine
from benchmarks.rig.hostile import MESSAGES
from benchmarks.rig.lines import LineProcess, module
from benchmarks.rig.synthetic_engine import FIRST_PLAIN_ID
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_kit.channel import open_channel

NUM_STREAMS = 32
TOKENS_PER_S = 20.0
ROUNDS = 5
MAX_ADDED_MS = 50.0
_TIMES = 3
_WINDOW_S = 1.5
# More than a measurement takes.
_TOKENS = 500_000
_BEGIN_LIMIT_S = 30.0
_SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Window:
    longest_gap_ms: float
    p99_gap_ms: float
    statuses: str = ""


class Streams:
    """Endless streams, and when each of their deltas came."""

    def __init__(self) -> None:
        self._instants: list[list[float]] = []

    @property
    def num_begun(self) -> int:
        return sum(bool(instants) for instants in self._instants)

    async def read(self, stub: inference_pb2_grpc.InferenceServiceStub, index: int) -> None:
        """Read one stream until it is cancelled."""
        instants: list[float] = []
        self._instants.append(instants)
        ids = generate_pb2.TokenIds(ids=[FIRST_PLAIN_ID + index] * 32)
        sampling = sampling_pb2.SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
        async for _ in stub.Generate(generate_pb2.GenerateRequest(token_ids=ids, sampling=sampling)):
            instants.append(time.monotonic())  # noqa: PERF401  It is read while the stream is open.
        raise RuntimeError("a stream ended")

    def gaps_ms(self, since: float) -> list[float]:
        """Gaps that ended after `since`; one that is still open counts as well. Forgets what is older."""
        now, gaps = time.monotonic(), []
        for instants in self._instants:
            first = max(0, sum(instant < since for instant in instants) - 1)
            del instants[:first]
            gaps += [1000 * (b - a) for a, b in zip(instants, [*instants[1:], now], strict=True)]
        return gaps


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(MESSAGES), default=list(MESSAGES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=ROUNDS)


def run(options: argparse.Namespace) -> Report:
    rows = asyncio.run(_measure(options.only, options.rounds))
    settings = {
        "num_streams": NUM_STREAMS,
        "tokens_per_s": TOKENS_PER_S,
        "rounds": options.rounds,
        "times": _TIMES,
    }
    return Report("hostile", settings, rows, shortfalls(rows))


def shortfalls(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row['message']}: the longest gap is {row['added_ms']:.0f} ms above quiet, "
        f"at most {MAX_ADDED_MS:g} is promised"
        for row in rows
        if isinstance(row["added_ms"], float) and row["added_ms"] > MAX_ADDED_MS
    ]


async def _measure(names: Sequence[str], rounds: int) -> list[Row]:
    rows: list[Row] = []
    async with _streaming() as (streams, sender):
        # A collection would stop all readers.
        gc.freeze()
        for name in names:
            quiet, loaded = [], []
            for _ in range(rounds):
                quiet.append(await _window(streams, None, ""))
                loaded.append(await _window(streams, sender, name))
            rows.append(_row(name, quiet, loaded))
            print(rows[-1], flush=True)
    return rows


def _row(name: str, quiet: Sequence[Window], loaded: Sequence[Window]) -> Row:
    def median(windows: Sequence[Window]) -> float:
        return statistics.median(window.longest_gap_ms for window in windows)

    return {
        "message": name,
        "bytes": len(MESSAGES[name].content),
        "statuses": loaded[-1].statuses,
        "quiet_ms": median(quiet),
        "loaded_ms": median(loaded),
        "added_ms": median(loaded) - median(quiet),
        "quiet_p99_ms": statistics.median(window.p99_gap_ms for window in quiet),
        "loaded_p99_ms": statistics.median(window.p99_gap_ms for window in loaded),
    }


async def _window(streams: Streams, sender: LineProcess | None, name: str) -> Window:
    began_at, statuses = time.monotonic(), ""
    if sender is not None:
        answer = await asyncio.to_thread(sender.ask, name=name, times=_TIMES)
        statuses = ", ".join(f"{count} {code}" for code, count in answer["statuses"].items())
    await asyncio.sleep(max(0.0, began_at + _WINDOW_S - time.monotonic()))
    gaps = streams.gaps_ms(began_at)
    return Window(max(gaps), percentile(gaps, 99), statuses)


@contextlib.asynccontextmanager
async def _streaming() -> AsyncIterator[tuple[Streams, LineProcess]]:
    """A frontend with all streams begun, and the process that sends messages."""
    streams = Streams()
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(synthetic_engine(TOKENS_PER_S))
        served = await stack.enter_async_context(frontend(engine))
        address = served.announcement.address
        sender = stack.enter_context(LineProcess(module("benchmarks.rig.hostile", f"--address={address}")))
        channel = await stack.enter_async_context(open_channel(address))
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        readers = [asyncio.ensure_future(streams.read(stub, index)) for index in range(NUM_STREAMS)]
        stack.callback(lambda: [reader.cancel() for reader in readers])
        async with asyncio.timeout(_BEGIN_LIMIT_S):
            # Several tasks begin; there is no one event to wait for.
            while streams.num_begun < NUM_STREAMS:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(_SETTLE_S)
        yield streams, sender
