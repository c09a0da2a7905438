"""Output tokens per second with `--speculative auto` over those without, in turns: it must never be slower.

    python -m benchmarks speculation_speed --model M1 --json benchmarks/results/speculation_speed.json

Both engines are processes of their own with one compute thread on the same core; each waits while the other
works, and which is first alternates. Prompts are random, or texts of which an answer repeats much: code to be
edited, records to be printed again, the turns of an agent. Models with random weights answer neither, but
their outputs repeat themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.contestants.jobs import Job
from benchmarks.report import Report, Row, median_interval
from benchmarks.scenarios.engine.contest import Contestant, Entry

_ROOT = Path(__file__).resolve().parents[2]
_CODE = (_ROOT / "triptych_kit" / "clock.py").read_text(encoding="utf-8")
_BOUND = 0.02
_PROMPT_TOKENS = 160
_NAMES = ("Ann", "Bob", "Eve", "Joe", "Kim", "Lea", "Max", "Zoe")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, action="append", required=True, help="checkpoint folder")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="default: all")
    parser.add_argument("--concurrency", default="1,4,16,64", help="requests at once")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--core", type=int, default=1, help="the core that computes")


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    for model in options.model:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        with ExitStack() as stack:
            pair = [_start(model, method, options.core) for method in ("off", options.method)]
            for contestant in pair:
                stack.enter_context(contestant.process)
            for workload in options.workload or [*WORKLOADS]:
                for count in map(int, options.concurrency.split(",")):
                    prompts = [WORKLOADS[workload](tokenizer, random.Random(seed)) for seed in range(count)]
                    job = Job([], options.tokens, 0, given=prompts)
                    rows.append(
                        {"model": model.name, "workload": workload, **_measure(pair, job, options.rounds)}
                    )
                    print(rows[-1], file=sys.stderr, flush=True)
    shortfalls = [
        f"{row['model']}, {row['workload']}, {row['requests']} requests: {row['ratio']:.3f}"
        for row in rows
        if row["falls_short"]
    ]
    settings = {"rounds": options.rounds, "tokens": options.tokens, "method": options.method, "bound": _BOUND}
    return Report("speculation_speed", settings, rows, shortfalls)


def _start(model: Path, method: str, core: int) -> Contestant:
    command = [
        sys.executable,
        "-m",
        "benchmarks.contestants.triptych",
        str(model.resolve()),
        "bfloat16",
        str(core),
    ]
    paths = os.pathsep.join(str(_ROOT / name) for name in (".", "protos", "kernels"))
    entry = Entry(method, [*command, f'speculative="{method}"'], {"PYTHONPATH": paths}, is_pinned=False)
    return Contestant(entry, core)


def _measure(pair: Sequence[Contestant], job: Job, num_rounds: int) -> Row:
    """Prompts are in the prefix cache but for the first turn, so that decoding is what is measured."""
    for contestant in pair:
        contestant.do(job)
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in pair}
    for round_index in range(num_rounds):
        for contestant in pair if round_index % 2 == 0 else reversed(pair):
            seconds[contestant.name].append(contestant.do(job))
    accepted = pair[1].process.ask(**asdict(job))["accepted_drafts"]
    off, on = (seconds[contestant.name] for contestant in pair)
    interval = median_interval([before / after for before, after in zip(off, on, strict=True)], 0)
    num_tokens = len(job.prompts()) * job.num_output_tokens
    return {
        "requests": len(job.prompts()),
        "off_tokens_per_s": num_tokens / statistics.median(off),
        "on_tokens_per_s": num_tokens / statistics.median(on),
        "ratio": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        # Every other token took a step of its row.
        "accepted_per_step": accepted / (num_tokens - accepted),
        "falls_short": interval.falls_short(_BOUND, higher_is_better=True),
    }


def _random(tokenizer: Tokenizer, choose: random.Random) -> list[int]:
    return [choose.randrange(10, 16_000) for _ in range(_PROMPT_TOKENS)]


def _asked(tokenizer: Tokenizer, question: str) -> list[int]:
    """As a turn of a chat, where the tokenizer has marks for that."""
    if tokenizer.token_to_id("<start_of_turn>") is not None:
        question = f"<bos><start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n"
    ids: list[int] = tokenizer.encode(question, add_special_tokens=False).ids
    return ids


def _edit(tokenizer: Tokenizer, choose: random.Random) -> list[int]:
    begin = choose.randrange(300)
    code = _CODE[begin : begin + 900]
    question = f"```python\n{code}\n```\nWrite this code again, with `now` renamed to `time_{begin}`."
    return _asked(tokenizer, question)


def _records(tokenizer: Tokenizer, choose: random.Random) -> list[int]:
    records = [
        {"id": choose.randrange(10_000), "name": choose.choice(_NAMES), "active": choose.random() < 0.5}
        for _ in range(8)
    ]
    return _asked(tokenizer, f"{json.dumps(records, indent=1)}\nPrint this list again, all of them active.")


def _agent(tokenizer: Tokenizer, choose: random.Random) -> list[int]:
    turns = [
        f'Thought: I need the weather of {name}.\nAction: get_weather({{"city": "{name}"}})\n'
        f"Observation: {choose.randrange(30)} degrees\n"
        for name in choose.sample(_NAMES, 4)
    ]
    return _asked(tokenizer, "Continue in this form for further cities.\n" + "".join(turns))


WORKLOADS: dict[str, Callable[[Tokenizer, random.Random], list[int]]] = {
    "random": _random,
    "edit": _edit,
    "records": _records,
    "agent": _agent,
}
