"""Tokens per second with everything on that shows what happens, beside everything off.

    python -m benchmarks observability --json benchmarks/results/observability.json
    python -m benchmarks observability --only-traces --json benchmarks/results/observability_traces.json

Two stacks of coordinator, frontend and engine serve the same model. One has the scheduler's trace, metrics of
KV blocks and an OTLP collector, is scraped every second and watched at ten states a second; the other has
none of it. They serve the same load in turns. Promised: the median of the ratios is at least 0.97. With
`--only-traces` the collector gets spans of both services, every request is sampled, and nothing else is on:
then at least 0.99.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.checkpoint import CheckpointShape, make_checkpoint
from benchmarks.report import Report, Row, median_interval
from benchmarks.rig.lines import LineProcess, module
from benchmarks.rig.processes import Fleet, ServicePlan
from triptych.common.v1 import sampling_pb2
from triptych_cli.bench.dataset import Turn
from triptych_cli.bench.load import LoadGenerator
from triptych_cli.bench.metrics import summarize
from triptych_cli.bench.transport import GRPCTransport, RequestBuilder
from triptych_kit.channel import open_channel
from triptych_kit.clock import MonotonicClock

MIN_RATIO = 0.97
MIN_RATIO_OF_TRACES = 0.99
# That of SmolLM2-135M.
_SHAPE = CheckpointShape(
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    intermediate_size=1536,
    vocabulary_size=49_152,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only-traces", action="store_true", help="no metrics, scrapes or scheduler's trace")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder, "model"), _SHAPE, dtype=torch.bfloat16, seed=options.seed)
        row = asyncio.run(_measure(Path(folder), options))
    names = ("streams", "prompt", "new", "rounds", "seed", "only_traces")
    settings = {name: getattr(options, name) for name in names}
    least = MIN_RATIO_OF_TRACES if options.only_traces else MIN_RATIO
    shortfalls = [] if float(str(row["ratio"])) >= least else [f"ratio {row['ratio']} below {least}"]
    return Report("observability", settings, [row], shortfalls)


class Stack:
    """The three services, which serve what they are given."""

    def __init__(self, fleet: Fleet, builder: RequestBuilder) -> None:
        self.fleet = fleet
        self._builder = builder

    async def start(self, model: Path, flags: tuple[str, ...], environment: dict[str, str]) -> None:
        coordinator = self.fleet.add(ServicePlan("coordinator", 0, (), environment))
        await self.fleet.start()
        known = f"--coordinator={coordinator.address}"
        engine_flags = (str(model), "--dtype=bfloat16", "--num-threads=1", known, *flags)
        self.fleet.add(ServicePlan("engine", 0, engine_flags, environment))
        self.fleet.add(ServicePlan("frontend", 0, (known,), environment))
        await self.fleet.start()
        await self.fleet.until_routed()

    async def serve(self, prompts: list[list[int]], num_new: int) -> float:
        """Output tokens per second."""
        async with open_channel(self.fleet["frontend-0"].address, profile="public") as channel:
            generator = LoadGenerator(GRPCTransport([channel], self._builder), MonotonicClock())
            await generator.run([[Turn(prompt, num_new)] for prompt in prompts], [0.0] * len(prompts))
        summary = summarize(generator.timelines)
        if summary.num_completed != len(prompts):
            raise RuntimeError(f"requests failed: {summary.failures}")
        return summary.output_tokens_per_s


async def _measure(folder: Path, options: argparse.Namespace) -> Row:
    choose = random.Random(options.seed)
    sampling = sampling_pb2.SamplingParams(temperature=0.0, ignore_eos=True)
    builder = RequestBuilder("", sampling, options.seed)
    rates: dict[str, list[float]] = {"off": [], "on": []}
    trace = folder / "trace.jsonl"
    async with contextlib.AsyncExitStack() as resources:
        observers = resources.enter_context(LineProcess(module("benchmarks.rig.observers")))
        stacks = {}
        for name in rates:
            logs = folder / name
            logs.mkdir()
            stacks[name] = Stack(await resources.enter_async_context(Fleet(logs)), builder)
        await stacks["off"].start(folder / "model", (), {})
        flags: tuple[str, ...] = (f"--sched-trace-path={trace}", "--kv-cache-metrics")
        variable = "OTEL_EXPORTER_OTLP_ENDPOINT"
        if options.only_traces:
            flags, variable = (), "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
        await stacks["on"].start(folder / "model", flags, {variable: observers.facts["endpoint"]})
        watched = [process.admin_http for process in stacks["on"].fleet.processes.values()]
        frontend = stacks["on"].fleet["frontend-0"].admin_http
        for index in range(options.rounds + 1):
            prompts = [
                [choose.randrange(_SHAPE.vocabulary_size) for _ in range(options.prompt)]
                for _ in range(options.streams)
            ]
            for name in ("off", "on") if index % 2 else ("on", "off"):
                if name == "on" and not options.only_traces:
                    observers.ask(do="watch", services=watched, frontend=frontend)
                rate = await stacks[name].serve(prompts, options.new)
                if name == "on":
                    seen = observers.ask(do="rest")
                # The first round is not counted.
                rates[name] += [rate] if index else []
            print(f"round {index}: {rate:.0f} {seen}", file=sys.stderr)
    ratios = [on / off for off, on in zip(rates["off"], rates["on"], strict=True)]
    interval = median_interval(ratios, options.seed)
    return {
        "streams": options.streams,
        "off_tok_s": statistics.median(rates["off"]),
        "on_tok_s": statistics.median(rates["on"]),
        "ratio": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "trace_bytes": 0 if options.only_traces else trace.stat().st_size,
        **seen,
        "off_rounds": rates["off"],
        "on_rounds": rates["on"],
    }
