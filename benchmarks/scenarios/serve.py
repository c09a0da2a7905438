"""Tokens per second of a served model at 1, 8 and 32 streams, beside `transformers` on the same weights.

    python -m benchmarks serve --json serve.json

At each level both systems answer the same prompts of random ids in turn, with as many threads and in the same
dtype; a level's rate is the median of its repeats, its ratio the median of the ratios of neighbours. The load
is that of `triptych bench serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from benchmarks.checkpoint import CheckpointShape, make_checkpoint
from benchmarks.report import Report, Row, Value
from benchmarks.rig.processes import Fleet, ServicePlan
from triptych.common.v1 import sampling_pb2
from triptych_cli.bench.dataset import Turn
from triptych_cli.bench.load import LoadGenerator
from triptych_cli.bench.metrics import Distribution, Summary, summarize
from triptych_cli.bench.transport import GRPCTransport, RequestBuilder
from triptych_kit.channel import open_channel
from triptych_kit.clock import MonotonicClock


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="Hugging Face folder; without it a random Llama of 14 M")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="at once")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each system and level")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", type=int, help="threads of either system; without it one a core")
    parser.add_argument("--flag", action="append", default=[], help="a further flag of the engine")


def run(options: argparse.Namespace) -> Report:
    logging.disable_progress_bar()
    options.num_threads = options.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(options.num_threads)
    with _model_folder(options) as folder:
        baseline = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype))
        rows = asyncio.run(_measure(folder, baseline.train(False), options))
    names = ("dtype", "prompt", "new", "repeats", "seed", "num_threads")
    settings: dict[str, Value] = {name: getattr(options, name) for name in names}
    settings |= {"num_parameters": baseline.num_parameters(), "flags": " ".join(options.flag)}
    return Report("serve", settings, rows)


@contextlib.contextmanager
def _model_folder(options: argparse.Namespace) -> Iterator[Path]:
    """The given folder, or a made one for as long as the block lasts."""
    if options.model is not None:
        yield options.model
        return
    with tempfile.TemporaryDirectory() as folder:
        dtype = getattr(torch, options.dtype)
        make_checkpoint(Path(folder), CheckpointShape(), dtype=dtype, seed=options.seed)
        yield Path(folder)


async def _measure(folder: Path, baseline: PreTrainedModel, options: argparse.Namespace) -> list[Row]:
    choose = random.Random(options.seed)
    flags = (str(folder), f"--dtype={options.dtype}", f"--num-threads={options.num_threads}", *options.flag)

    def draw(count: int) -> list[list[int]]:
        """Fresh prompts every round: none may find its blocks in the prefix cache."""
        size = baseline.config.vocab_size
        return [[choose.randrange(size) for _ in range(options.prompt)] for _ in range(count)]

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as logs:
        async with Fleet(Path(logs)) as fleet, contextlib.AsyncExitStack() as stack:
            coordinator = fleet.add(ServicePlan("coordinator", 0))
            await fleet.start()
            known = f"--coordinator={coordinator.address}"
            fleet.add(ServicePlan("engine", 0, (*flags, known)))
            frontend = fleet.add(ServicePlan("frontend", 0, (known,)))
            await fleet.start()
            await fleet.until_routed()
            channel = await stack.enter_async_context(open_channel(frontend.address, profile="public"))
            sampling = sampling_pb2.SamplingParams(temperature=0.0, ignore_eos=True)
            builder = RequestBuilder("", sampling, options.seed)

            async def serve(prompts: Sequence[Sequence[int]]) -> Summary:
                generator = LoadGenerator(GRPCTransport([channel], builder), MonotonicClock())
                conversations = [[Turn(prompt, options.new)] for prompt in prompts]
                await generator.run(conversations, [0.0] * len(prompts))
                summary = summarize(generator.timelines)
                if summary.num_completed != len(prompts):
                    raise RuntimeError(f"requests failed: {summary.failures}")
                return summary

            for level in options.streams:
                prompts = draw(level)
                await serve(prompts)
                _generate(baseline, prompts, options.new)
                served: list[Summary] = []
                generated: list[float] = []
                for _ in range(options.repeats):
                    prompts = draw(level)
                    served.append(await serve(prompts))
                    generated.append(_generate(baseline, prompts, options.new))
                rows.append(_row(level, options.dtype, served, generated))
    return rows


def _generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> float:
    """Tokens per second of `generate` on one batch of prompts of equal length."""
    input_ids = torch.tensor(prompts)
    began = time.perf_counter()
    with torch.inference_mode():
        # The stubs take `generate` for a tensor of the module.
        output = model.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            min_new_tokens=num_new_tokens,
            max_new_tokens=num_new_tokens,
        )
    elapsed = time.perf_counter() - began
    return (output.shape[1] - input_ids.shape[1]) * len(prompts) / elapsed


def _row(level: int, dtype: str, served: Sequence[Summary], generated: Sequence[float]) -> Row:
    rates = [summary.output_tokens_per_s for summary in served]

    def median(distributions: Sequence[Distribution | None], name: str) -> float | None:
        values = [float(getattr(each, name)) for each in distributions if each is not None]
        return statistics.median(values) if values else None

    return {
        "streams": level,
        "dtype": dtype,
        "out_tok_s": statistics.median(rates),
        "ttft_p50_ms": median([summary.ttft_ms for summary in served], "median"),
        "ttft_p99_ms": median([summary.ttft_ms for summary in served], "p99"),
        "itl_p50_ms": median([summary.itl_ms for summary in served], "median"),
        "itl_p99_ms": median([summary.itl_ms for summary in served], "p99"),
        "hf_tok_s": statistics.median(generated),
        "ratio": statistics.median(ours / theirs for ours, theirs in zip(rates, generated, strict=True)),
        "out_tok_s_rounds": rates,
        "hf_tok_s_rounds": list(generated),
    }
