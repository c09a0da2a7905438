"""Output tokens per second with `--speculative auto` over those without, in turns: it must never be slower.

    python -m benchmarks speculation_speed --model embedded --json benchmarks/results/speculation_speed.json

Both engines are processes of their own with one compute thread on the same core; each waits while the other
works, and which is first alternates. Two processes of one engine differ by up to 2 % for as long as they run,
so both are started anew, `--pairs` times, and on while a cell is undecided, up to `--max-pairs`.
`--method off` measures an engine against itself. Prompts are random, questions whose answers do not repeat,
or texts of which an answer repeats much: code to be edited, records to be printed again, the turns of an
agent. Models with random weights answer none of them; their greedy outputs repeat themselves, drawn ones do
not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.contestants.jobs import Job
from benchmarks.report import Interval, Report, Row
from benchmarks.scenarios.engine.contest import Contestant, Entry
from triptych_cli.services import embedded_model

_ROOT = Path(__file__).resolve().parents[2]
_CODE = (_ROOT / "triptych_kit" / "clock.py").read_text(encoding="utf-8")
_LEAST_RATIO = 0.99  # of the median of each cell
_LEAST_MEAN = 0.995  # of the geometric mean over all
_WIDEST = 0.04  # an interval that decides
_FEWEST_TURNS = 3  # of a cell by one pair
_NUM_RESAMPLES = 1000
_PROMPT_TOKENS = 160
_MAX_MODEL_LEN = 1024
_NAMES = ("Ann", "Bob", "Eve", "Joe", "Kim", "Lea", "Max", "Zoe")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", help="checkpoint folder, or embedded (the default)")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="default: all")
    parser.add_argument("--concurrency", default="1,4,8,16,64", help="requests at once")
    parser.add_argument("--temperature", default="0,1")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of a request")
    parser.add_argument("--pairs", type=int, default=4, help="of processes, at least")
    parser.add_argument("--max-pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=6.0, help="at least, of a cell by one pair")
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
        "pairs": options.pairs,
        "max_pairs": options.max_pairs,
        "seconds": options.seconds,
        "tokens": options.tokens,
        "method": options.method,
        "least_ratio": _LEAST_RATIO,
        "least_mean": _LEAST_MEAN,
        "geometric_mean": mean,
    }
    return Report("speculation_speed", settings, rows, shortfalls)


@dataclass
class _Cell:
    """One job, and the seconds of its turns: a list for each pair of processes.

    num_accepted: drafts, in one turn.
    """

    workload: str
    job: Job
    off: list[list[float]] = field(default_factory=list)
    on: list[list[float]] = field(default_factory=list)
    num_accepted: float = 0.0

    def measure(self, off: Contestant, on: Contestant, least_s: float) -> None:
        """Prompts are in the prefix cache but for the first turn, so that decoding is what is measured."""
        self.off.append([])
        self.on.append([])
        in_turns = [(off, self.off[-1]), (on, self.on[-1])]
        for contestant, _ in in_turns:
            contestant.do(self.job)
        while len(self.off[-1]) < _FEWEST_TURNS or sum(self.off[-1]) + sum(self.on[-1]) < least_s:
            for contestant, seconds in in_turns:
                seconds.append(contestant.do(self.job))
            in_turns.reverse()
        self.num_accepted = on.process.ask(**asdict(self.job))["accepted_drafts"]

    def ratio(self) -> Interval:
        """Of the speeds: the mean of the pairs' medians; its interval by pairs and turns drawn again."""
        pairs = [
            [before / after for before, after in zip(off, on, strict=True)]
            for off, on in zip(self.off, self.on, strict=True)
        ]
        choose = random.Random(0)
        means = sorted(
            statistics.mean(
                statistics.median(choose.choices(turns, k=len(turns)))
                for turns in choose.choices(pairs, k=len(pairs))
            )
            for _ in range(_NUM_RESAMPLES)
        )
        low, high = means[int(0.025 * _NUM_RESAMPLES)], means[int(0.975 * _NUM_RESAMPLES)]
        return Interval(statistics.mean(map(statistics.median, pairs)), low, high)

    def is_decided(self) -> bool:
        ratio = self.ratio()
        is_exact = ratio.high - ratio.low <= _WIDEST
        return ratio.low >= _LEAST_RATIO or ratio.high < _LEAST_RATIO or (is_exact and _holds(ratio))

    def row(self, model: str) -> Row:
        ratio = self.ratio()
        num_requests, num_tokens = (
            len(self.job.prompts()),
            len(self.job.prompts()) * self.job.num_output_tokens,
        )
        return {
            "model": model,
            "workload": self.workload,
            "temperature": self.job.temperature,
            "requests": num_requests,
            "pairs": len(self.off),
            "turns": sum(map(len, self.off)),
            "off_tokens_per_s": num_tokens / statistics.median(chain.from_iterable(self.off)),
            "on_tokens_per_s": num_tokens / statistics.median(chain.from_iterable(self.on)),
            "ratio": ratio.estimate,
            "low": ratio.low,
            "high": ratio.high,
            # Every other token took a step of its row.
            "accepted_per_step": self.num_accepted / (num_tokens - self.num_accepted),
            "decides": self.is_decided(),
            "falls_short": not _holds(ratio),
        }


def _holds(ratio: Interval) -> bool:
    return ratio.estimate >= _LEAST_RATIO


def _measure_model(name: str, options: argparse.Namespace) -> Iterator[Row]:
    model = embedded_model() if name == "embedded" else Path(name)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    cells = []
    for workload in options.workload or WORKLOADS:
        for count in map(int, options.concurrency.split(",")):
            prompts = [WORKLOADS[workload](tokenizer, random.Random(seed)) for seed in range(count)]
            for temperature in map(float, options.temperature.split(",")):
                job = Job([], options.tokens, 0, given=prompts, temperature=temperature)
                cells.append(_Cell(workload, job))
    for num_pairs in range(options.max_pairs):
        undecided = [cell for cell in cells if num_pairs < options.pairs or not cell.is_decided()]
        if not undecided:
            break
        with ExitStack() as stack:
            methods = ["off", options.method] if num_pairs % 2 == 0 else [options.method, "off"]
            started = [_start(model, method, options.core) for method in methods]
            for contestant in started:
                stack.enter_context(contestant.process)
            off, on = started if num_pairs % 2 == 0 else reversed(started)
            for cell in undecided:
                cell.measure(off, on, options.seconds)
        print(f"{name}: {num_pairs + 1} pairs, {len(undecided)} cells measured", file=sys.stderr, flush=True)
    yield from (cell.row(Path(name).name) for cell in cells)


def _start(model: Path, method: str, core: int) -> Contestant:
    command = [sys.executable, "-m", "benchmarks.contestants.triptych", str(model.resolve())]
    settings = ["bfloat16", str(core), f'speculative="{method}"', f"max_model_len={_MAX_MODEL_LEN}"]
    paths = os.pathsep.join(str(_ROOT / name) for name in (".", "protos", "kernels"))
    entry = Entry(method, [*command, *settings], {"PYTHONPATH": paths}, is_pinned=False)
    return Contestant(entry, core)


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
