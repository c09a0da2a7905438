"""Tokens per second of a served model at 1, 8 and 32 streams, beside `transformers` on the same weights.

    python -m benchmarks.serve_smoke --json smoke.json

At each level both systems answer the same prompts of random ids in turn, with as many threads and in the same
dtype; a level's figure is the median of its repeats, its ratio the median of the ratios of neighbours.
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
from dataclasses import dataclass, field
from pathlib import Path

from service_kit.process import prepare_process

prepare_process("client")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402
from transformers.utils import logging  # noqa: E402

from benchmarks.checkpoint import CheckpointShape, make_checkpoint  # noqa: E402
from benchmarks.load import StreamTimes, percentile, run_streams, tokens_per_second  # noqa: E402
from benchmarks.report import Report, Row, print_table  # noqa: E402
from benchmarks.serving import serving  # noqa: E402
from service_kit.channel import open_channel  # noqa: E402

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of both systems."""

    levels: tuple[int, ...]
    num_prompt_tokens: int
    num_new_tokens: int
    num_repeats: int
    seed: int


@dataclass(slots=True)
class LevelResults:
    """What one level measured, a value for each repeat."""

    served: list[float] = field(default_factory=list)  # tokens per second
    generated: list[float] = field(default_factory=list)  # tokens per second of transformers
    streams: list[StreamTimes] = field(default_factory=list)


def main() -> None:
    """Run the benchmark, print its table and write its report."""
    arguments = _parse()
    logging.disable_progress_bar()
    num_threads = arguments.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    load = Load(tuple(arguments.levels), arguments.prompt, arguments.new, arguments.repeats, arguments.seed)
    with _model_folder(arguments.model, arguments.dtype, arguments.seed) as folder:
        baseline = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.dtype))
        flags = ["--dtype", arguments.dtype, "--num-threads", str(num_threads), *arguments.serve_flag]
        with serving(folder, flags) as served:
            results = asyncio.run(_measure(served.grpc_address, baseline.train(False), load))
    rows = [_row_of(level, result) for level, result in results.items()]
    print_table(rows)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "model")}
    settings |= {"model": str(arguments.model or "random Llama"), "num_threads": num_threads}
    settings |= {"num_parameters": baseline.num_parameters()}
    if arguments.json:
        Report("serve_smoke", settings, rows).write(arguments.json)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; without it a random Llama of 15 M")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 8, 32], help="concurrent streams")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each system and level")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", type=int, help="threads of either system; without it one a core")
    parser.add_argument("--serve-flag", action="append", default=[], help="a further flag for `serve`")
    return parser.parse_args()


@contextlib.contextmanager
def _model_folder(given: Path | None, dtype: str, seed: int) -> Iterator[Path]:
    """The given folder, or a made one for as long as the block lasts."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), CheckpointShape(), dtype=getattr(torch, dtype), seed=seed)
        yield Path(folder)


async def _measure(address: str, baseline: PreTrainedModel, load: Load) -> dict[int, LevelResults]:
    rng = random.Random(load.seed)
    vocabulary_size = baseline.config.vocab_size
    results = {level: LevelResults() for level in load.levels}
    async with open_channel(address, profile="public") as channel:
        for level, result in results.items():
            # Fresh prompts every round: none may find its blocks in the prefix cache.
            warm_up = _draw_prompts(rng, level, load.num_prompt_tokens, vocabulary_size)
            await run_streams(channel, warm_up, load.num_new_tokens)
            _generate(baseline, warm_up, load.num_new_tokens)
            for _ in range(load.num_repeats):
                prompts = _draw_prompts(rng, level, load.num_prompt_tokens, vocabulary_size)
                streams = await run_streams(channel, prompts, load.num_new_tokens)
                result.streams += streams
                result.served.append(tokens_per_second(streams))
                result.generated.append(_generate(baseline, prompts, load.num_new_tokens))
    return results


def _draw_prompts(rng: random.Random, count: int, length: int, vocabulary_size: int) -> Prompts:
    return [[rng.randrange(vocabulary_size) for _ in range(length)] for _ in range(count)]


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


def _row_of(level: int, result: LevelResults) -> Row:
    firsts = [stream.first_token_s * 1000 for stream in result.streams]
    gaps = [gap * 1000 for stream in result.streams for gap in stream.gaps_s]
    ratios = [served / generated for served, generated in zip(result.served, result.generated, strict=True)]
    return {
        "streams": level,
        "out_tok_s": statistics.median(result.served),
        "ttft_p50_ms": percentile(firsts, 50),
        "ttft_p99_ms": percentile(firsts, 99),
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
        "hf_tok_s": statistics.median(result.generated),
        "ratio": statistics.median(ratios),
        "out_tok_s_rounds": result.served,
        "hf_tok_s_rounds": result.generated,
    }


if __name__ == "__main__":
    main()
