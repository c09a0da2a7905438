"""What clients that stop reading cost the others: 500 of them beside 64 healthy streams, on the real stack.

python -m benchmarks.slow_readers --json out.json

Prints the engine's time a step beside as many clients that read and beside clients that do not, what the
healthy streams lost, and how the frontend's memory grew and shrank.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import torch

from benchmarks.checkpoint import CheckpointShape, make_checkpoint
from benchmarks.report import Report, Row, print_table
from benchmarks.serving import Served, serving
from benchmarks.slow_clients import new_request
from triptych.api.v1 import inference_pb2_grpc
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2

_SHAPE = CheckpointShape(
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=352,
    vocabulary_size=2_048,
    max_position_embeddings=4_096,
)
_FLAGS = ("--max-num-seqs", "1024", "--max-num-batched-tokens", "4096", "--max-queued-requests", "2048")
_FIRST_HEALTHY = 1_000_000
_CLIENT_TOKENS = 3_000
_IDLE_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Round:
    """What the healthy streams saw, and how long the engine's steps were meanwhile."""

    token_ids: list[list[int]]
    step_ms: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both rounds and print what they show."""
    options = _parse(arguments)
    flags = (*_FLAGS, "--slow-reader-s", str(options.grace_s))
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), _SHAPE, dtype=torch.float32, seed=0)
        with serving(Path(folder), flags) as served:
            rows = asyncio.run(_run(served, options))
    print_table(rows)
    if options.json is not None:
        settings = {"stopped": options.num, "healthy": options.healthy, "grace_s": options.grace_s}
        Report("slow_readers", settings, rows).write(options.json)


async def _run(served: Served, options: argparse.Namespace) -> list[Row]:
    frontend = served.pids["frontend-0"]
    await _healthy(served, options)
    await _until_idle(served)
    before_mb = _resident_mb(frontend)
    with _clients(served, options, stops=False):
        reading = await _healthy(served, options)
    await _until_idle(served)
    reading_mb = _resident_mb(frontend)
    with _clients(served, options, stops=True):
        seen_mb: list[float] = []
        watch = asyncio.ensure_future(_watch_mb(frontend, seen_mb))
        stopped = await _healthy(served, options)
        # Who stopped is ended by the frontend, not by us.
        await _until_idle(served)
        watch.cancel()
        ended_mb = _resident_mb(frontend)
    after = await _healthy(served, options)
    await _until_idle(served)
    num_lost = sum(one != two for one, two in zip(reading.token_ids, stopped.token_ids, strict=True)) + sum(
        len(ids) != options.tokens for ids in stopped.token_ids
    )
    return [
        {
            "step_ms_reading": round(reading.step_ms, 2),
            "step_ms_stopped": round(stopped.step_ms, 2),
            "ratio": round(stopped.step_ms / reading.step_ms, 3),
            "healthy_streams_changed": num_lost,
            "distinct_ids": len({token_id for ids in stopped.token_ids for token_id in ids}),
            "frontend_mb_before": round(before_mb),
            "frontend_mb_reading": round(reading_mb),
            "frontend_mb_highest": round(max(seen_mb)),
            "frontend_mb_ended": round(ended_mb),
            "frontend_mb_afterwards": round(_resident_mb(frontend)),
            "same_after": after.token_ids == reading.token_ids,
        }
    ]


async def _healthy(served: Served, options: argparse.Namespace) -> Round:
    """Stream to the end what is always the same, and time the engine's steps."""
    async with (
        grpc.aio.insecure_channel(served.grpc_address) as channel,
        grpc.aio.insecure_channel(served.addresses["engine-0"]) as to_engine,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        engine = engine_pb2_grpc.EngineCoreServiceStub(to_engine)
        first, first_at = (await _stats(engine)).step_number, time.monotonic()
        streams = [_collect(stub, _FIRST_HEALTHY + index, options.tokens) for index in range(options.healthy)]
        token_ids = await asyncio.gather(*streams)
        num_steps = (await _stats(engine)).step_number - first
        return Round(token_ids, (time.monotonic() - first_at) * 1000 / num_steps)


async def _collect(stub: inference_pb2_grpc.InferenceServiceStub, index: int, num_tokens: int) -> list[int]:
    request = new_request(index, _SHAPE.vocabulary_size, num_tokens)
    token_ids: list[int] = []
    async for response in stub.Generate(request):
        token_ids += response.delta.token_ids
    return token_ids


async def _until_idle(served: Served) -> None:
    async with (
        asyncio.timeout(_IDLE_LIMIT_S),
        grpc.aio.insecure_channel(served.addresses["engine-0"]) as channel,
    ):
        engine = engine_pb2_grpc.EngineCoreServiceStub(channel)
        while True:
            stats = await _stats(engine)
            if stats.num_running == stats.num_waiting == 0:
                return
            await asyncio.sleep(0.1)


async def _stats(engine: engine_pb2_grpc.EngineCoreServiceStub) -> session_pb2.Stats:
    return (await engine.GetLoad(engine_pb2.GetLoadRequest(), timeout=30)).stats


@contextmanager
def _clients(served: Served, options: argparse.Namespace, *, stops: bool) -> Iterator[None]:
    """The many clients in their process, from when all have begun until the end of the block."""
    command = [
        sys.executable, "-m", "benchmarks.slow_clients", "--address", served.grpc_address,
        "--num", str(options.num), "--tokens", str(_CLIENT_TOKENS),
        "--vocab-size", str(_SHAPE.vocabulary_size), *(["--stops"] if stops else []),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != "begun":
            raise RuntimeError(f"the clients ended with {process.wait()}")
        yield
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


async def _watch_mb(pid: int, seen_mb: list[float]) -> None:
    while True:
        seen_mb.append(_resident_mb(pid))
        await asyncio.sleep(0.2)


def _resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no resident memory")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num", type=int, default=500, help="clients that stop reading")
    parser.add_argument("--healthy", type=int, default=64, help="streams that are read")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of a healthy stream")
    parser.add_argument(
        "--grace-s", type=float, default=10.0, help="how long the frontend waits for a reader"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
