"""Output tokens per second with `--speculative auto` over those without, in turns: it must never be slower.

    python -m benchmarks speculation_speed --model embedded --json benchmarks/results/speculation_speed.json

Both engines are processes of their own with one compute thread on the same core; each waits while the other
works, and which is first alternates. Prompts are random, questions whose answers do not repeat, or texts of
which an answer repeats much: code to be edited, records to be printed again, the turns of an agent. Models
with random weights answer none of them; their greedy outputs repeat themselves, drawn ones do not. A cell is
measured until its interval lies on one side of the least ratio, for at most `--max-rounds`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.contestants.jobs import Job
from benchmarks.report import Report, Row, median_interval
from benchmarks.scenarios.engine.contest import Contestant, Entry
from triptych_cli.services import embedded_model

_ROOT = Path(__file__).resolve().parents[2]
_CODE = (_ROOT / "triptych_kit" / "clock.py").read_text(encoding="utf-8")
_LEAST_RATIO = 0.99  # of the median of each cell
_LEAST_MEAN = 0.995  # of the geometric mean over all
_WIDEST = 0.04  # an interval that decides
_PROMPT_TOKENS = 160
_MAX_MODEL_LEN = 1024
_NAMES = ("Ann", "Bob", "Eve", "Joe", "Kim", "Lea", "Max", "Zoe")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", help="checkpoint folder, or embedded (the default)")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="default: all")
    parser.add_argument("--concurrency", default="1,4,8,16,64", help="requests at once")
    parser.add_argument("--temperature", default="0,1")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=8, help="at least, of a cell")
    parser.add_argument("--max-rounds", type=int, default=64)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--core", type=int, default=1, help="the core that computes")


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    for model in options.model or ["embedded"]:
        for row in _measure_model(model, options):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    mean = statistics.geometric_mean(float(str(row["ratio"])) for row in rows)
    shortfalls = [
        f"{row['model']}, {row['workload']}, {row['requests']} requests, temperature {row['temperature']}: "
        f"{row['ratio']:.3f}{'' if row['decides'] else ', undecided'}"
        for row in rows
        if row["falls_short"] or not row["decides"]
    ]
    if mean < _LEAST_MEAN:
        shortfalls.append(f"the geometric mean is {mean:.4f}")
    settings = {
        "max_rounds": options.max_rounds,
        "tokens": options.tokens,
        "method": options.method,
        "least_ratio": _LEAST_RATIO,
        "least_mean": _LEAST_MEAN,
        "geometric_mean": mean,
    }
    return Report("speculation_speed", settings, rows, shortfalls)


def _measure_model(name: str, options: argparse.Namespace) -> Iterator[Row]:
    model = embedded_model() if name == "embedded" else Path(name)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with ExitStack() as stack:
        pair = [_start(model, method, options.core) for method in ("off", options.method)]
        for contestant in pair:
            stack.enter_context(contestant.process)
        for workload in options.workload or WORKLOADS:
            for count in map(int, options.concurrency.split(",")):
                prompts = [WORKLOADS[workload](tokenizer, random.Random(seed)) for seed in range(count)]
                for temperature in map(float, options.temperature.split(",")):
                    job = Job([], options.tokens, 0, given=prompts, temperature=temperature)
                    cell = {"model": Path(name).name, "workload": workload, "temperature": temperature}
                    yield {**cell, **_measure(pair, job, options.rounds, options.max_rounds)}


def _start(model: Path, method: str, core: int) -> Contestant:
    command = [sys.executable, "-m", "benchmarks.contestants.triptych", str(model.resolve())]
    settings = ["bfloat16", str(core), f'speculative="{method}"', f"max_model_len={_MAX_MODEL_LEN}"]
    paths = os.pathsep.join(str(_ROOT / name) for name in (".", "protos", "kernels"))
    entry = Entry(method, [*command, *settings], {"PYTHONPATH": paths}, is_pinned=False)
    return Contestant(entry, core)


def _measure(pair: Sequence[Contestant], job: Job, num_rounds: int, max_rounds: int) -> Row:
    """Prompts are in the prefix cache but for the first turn, so that decoding is what is measured."""
    for contestant in pair:
        contestant.do(job)
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in pair}
    off, on = (seconds[contestant.name] for contestant in pair)
    for round_index in range(max_rounds):
        for contestant in pair if round_index % 2 == 0 else reversed(pair):
            seconds[contestant.name].append(contestant.do(job))
        if round_index + 1 < num_rounds:
            continue
        interval = median_interval([before / after for before, after in zip(off, on, strict=True)], 0)
        if interval.low >= _LEAST_RATIO or interval.high < _LEAST_RATIO:
            break
    accepted = pair[1].process.ask(**asdict(job))["accepted_drafts"]
    num_tokens = len(job.prompts()) * job.num_output_tokens
    return {
        "requests": len(job.prompts()),
        "rounds": len(off),
        "off_tokens_per_s": num_tokens / statistics.median(off),
        "on_tokens_per_s": num_tokens / statistics.median(on),
        "ratio": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        # Every other token took a step of its row.
        "accepted_per_step": accepted / (num_tokens - accepted),
        "decides": interval.high - interval.low <= _WIDEST or interval.low >= _LEAST_RATIO,
        "falls_short": interval.estimate < _LEAST_RATIO,
    }


def _random(tokenizer: Tokenizer, choose: random.Random) -> list[int]:
    end = min(16_000, tokenizer.get_vocab_size())
    return [choose.randrange(10, end) for _ in range(_PROMPT_TOKENS)]


def _asked(tokenizer: Tokenizer, question: str) -> list[int]:
    """As a turn of a chat, where the tokenizer has marks for that."""
    if tokenizer.token_to_id("<start_of_turn>") is not None:
        question = f"<bos><start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n"
    ids: list[int] = tokenizer.encode(question, add_special_tokens=False).ids
    return ids


def _story(tokenizer: Tokenizer, choose: random.Random) -> list[int]:
    name, other = choose.sample(_NAMES, 2)
    return _asked(tokenizer, f"Tell me a story about {name}, {other} and {choose.randrange(2, 90)} birds.")


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
    "story": _story,
    "edit": _edit,
    "records": _records,
    "agent": _agent,
}
