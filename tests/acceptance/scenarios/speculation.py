"""Answers with drafts are those without: ids, ends and log probabilities, whatever happens to the requests.

    python -m tests.acceptance speculation --model M1 --model embedded --json speculation.json

Engines and a frontend serve each model in processes of their own, first without drafts, then with each
proposer; `scripted` knows the answers and is right with probability 0.7. Prompts repeat themselves, so that
those without a model find something; draft, eagle and mtp have networks that are made from the model and
trained on the answers. Of each cell, drafts have to be accepted and rejected, unless `--draft-limit gain` may
find that none pay. Engines with drafts write traces of their schedulers, whose replays decide the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import grpc.aio

from benchmarks.report import Report, Row
from benchmarks.rig.history import OutputSeen, outputs_of
from benchmarks.rig.processes import Fleet, ServicePlan, ServiceProcess
from benchmarks.rig.streams import FIRST_MARKER_ID, FIRST_PLAIN_ID, Case, Kind, StreamRecord
from tests.acceptance.rig.scripted_drafts import NAME as SCRIPTED
from tests.acceptance.rig.scripted_drafts import write_entry_point
from tests.acceptance.scenarios.languages.answers import changed, kill_amid, send
from triptych.common.v1 import sampling_pb2
from triptych_cli.services import embedded_model
from triptych_cli.verbs.replay import replay_file
from triptych_kit.channel import open_channel

_AT_ONCE = 64
_NUM_OUTPUTS = 4
_NUM_LOGPROBS = 3
_MIN_IN_FLIGHT = 8
_MIN_DISTINCT_IDS = 20
_LANGUAGE = "(red|green|blue|black)( (red|green|blue|black)){80}"
_ENGINE_FLAGS = ("--num-threads=1", f"--max-num-seqs={_AT_ONCE}", "--max-num-batched-tokens=256")
_FEW_BLOCKS = ("--block-size=4",)
_OPTIONS: Sequence[Mapping[str, float]] = (
    {},
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.05},
    {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
)
_TEMPERATURES = (0.0, 0.7, 1.0)
_NETWORKS = {"draft", "eagle", "mtp"}
_ONE_ENGINE = ("together", "alone", "n = 4", "logprobs", "grammar")

Answers = dict[int, list[OutputSeen]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", help="checkpoint folder, or embedded (the default)")
    parser.add_argument("--proposer", action="append", help="default: all")
    parser.add_argument("--train-steps", type=int, default=200, help="to train each head")
    parser.add_argument("--num-drafts", type=int, default=8, help="at most, of a request in a step")
    parser.add_argument("--draft-limit", choices=("none", "gain"), default="none")
    parser.add_argument("--variant", action="append", help="default: all")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--few-blocks", type=int, default=500, help="of 4 tokens, of the preempted engine")


def run(options: argparse.Namespace) -> Report:
    cells = _Cells(options)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.model or ["embedded"]:
            model = embedded_model() if name == "embedded" else Path(name)
            asyncio.run(cells.run_model(name, model, Path(folder)))
    settings = {
        "requests": options.requests,
        "tokens": options.tokens,
        "at_once": _AT_ONCE,
        "draft_limit": options.draft_limit,
    }
    return Report("speculation", settings, cells.rows, cells.shortfalls)


def make_cases(num_requests: int, num_tokens: int, seed: int = 34) -> list[Case]:
    """Prompts in which parts return, at every temperature with every option."""
    rng = random.Random(seed)
    combined = itertools.cycle(itertools.product(_OPTIONS, _TEMPERATURES))
    cases = []
    for key, (chosen, temperature) in zip(range(num_requests), combined, strict=False):
        part = [rng.randrange(FIRST_PLAIN_ID, FIRST_MARKER_ID) for _ in range(rng.randint(6, 24))]
        prompt = (*part, *(rng.randrange(FIRST_PLAIN_ID, FIRST_MARKER_ID) for _ in range(5)), *part)
        sampling = sampling_pb2.SamplingParams(
            temperature=temperature, seed=500 + key, max_tokens=num_tokens, ignore_eos=True, **chosen
        )
        cases.append(Case(key, Kind.SEEDED, prompt, sampling))
    return cases


@dataclass
class _Cells:
    """One row for each model, proposer and variant."""

    options: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    shortfalls: list[str] = field(default_factory=list)

    async def run_model(self, name: str, model: Path, folder: Path) -> None:
        cases = make_cases(self.options.requests, self.options.tokens)
        several = [
            changed(case, kind=Kind.SEVERAL, n=_NUM_OUTPUTS)
            for case in cases
            if case.sampling.temperature > 0.0
        ]
        logprobs = [changed(case, kind=Kind.LOGPROBS, logprobs=_NUM_LOGPROBS) for case in cases]
        requests = {"n = 4": several, "logprobs": logprobs, "grammar": [_constrained(case) for case in cases]}
        expected: dict[str, Answers] = {}
        async with _stack(model, folder) as (_, channel):
            for variant in ("together", "n = 4", "logprobs", "grammar"):
                if variant == "together" or self.wants(variant):
                    expected[variant] = await _answers(channel, requests.get(variant, cases), _AT_ONCE)
        if self.wants("tp 2"):
            async with _stack(model, folder, "--tensor-parallel-size=2") as (_, channel):
                expected["tp 2"] = await _answers(channel, cases, _AT_ONCE)
        if len(_distinct_ids(expected["together"])) < _MIN_DISTINCT_IDS:
            self.shortfalls.append(f"{name}: fewer than {_MIN_DISTINCT_IDS} distinct ids")
        texts = [
            (*cases[key].token_ids, *output.token_ids)
            for answers in expected.values()
            for key, outputs in answers.items()
            for output in outputs
        ]
        environment = write_entry_point(folder / f"{model.name}-texts", texts)
        proposers = self.options.proposer or ["ngram", "suffix", SCRIPTED, *sorted(_NETWORKS)]
        checkpoints = folder / f"{model.name}-checkpoints"
        if not _NETWORKS.isdisjoint(proposers):
            answers = [
                (*cases[key].token_ids, *outputs[0].token_ids)
                for variant in ("together", "grammar")
                for key, outputs in expected.get(variant, {}).items()
            ]
            num_steps = self.options.train_steps
            await asyncio.to_thread(_make_checkpoints, model, answers, checkpoints, num_steps)
        for proposer in proposers:
            cell = _Cell(self, name, model, folder, proposer, checkpoints, environment, expected)
            await cell.run_variants(cases, requests)

    def wants(self, variant: str) -> bool:
        return not self.options.variant or variant in self.options.variant


@dataclass(frozen=True)
class _Cell:
    """One model with one proposer."""

    cells: _Cells
    name: str
    model: Path
    folder: Path
    proposer: str
    checkpoints: Path
    environment: Mapping[str, str]
    expected: Mapping[str, Answers]

    async def run_variants(self, cases: Sequence[Case], requests: Mapping[str, Sequence[Case]]) -> None:
        wanted = [variant for variant in _ONE_ENGINE if self.cells.wants(variant)]
        if wanted:
            async with self._stack() as (fleet, channel):
                for variant in wanted:
                    at_once = 1 if variant == "alone" else _AT_ONCE
                    await self._compare(variant, fleet, channel, requests.get(variant, cases), at_once)
        if self.cells.wants("preempted"):
            few = (*_FEW_BLOCKS, f"--num-kv-blocks={self.cells.options.few_blocks}")
            async with self._stack(*few) as (fleet, channel):
                await self._compare("preempted", fleet, channel, cases)
        if self.cells.wants("killed"):
            async with self._stack(num_engines=2) as (fleet, channel):
                for engine in fleet.of("engine"):
                    await self._compare("killed", fleet, channel, cases, killed=engine)
                    await fleet.start()
                    await fleet.until_routed()
        if self.cells.wants("tp 2"):
            async with self._stack("--tensor-parallel-size=2") as (fleet, channel):
                await self._compare("tp 2", fleet, channel, cases)

    @contextlib.asynccontextmanager
    async def _stack(
        self, *flags: str, num_engines: int = 1
    ) -> AsyncIterator[tuple[Fleet, grpc.aio.Channel]]:
        options, model = self.cells.options, self.model
        own = [f"--speculative={self.proposer}", f"--num-speculative-tokens={options.num_drafts}"]
        own.append(f"--draft-limit={options.draft_limit}")
        if self.proposer == "mtp":
            model = self.checkpoints / self.proposer
        elif self.proposer in _NETWORKS:
            own.append(f"--speculative-model={self.checkpoints / self.proposer}")
        with tempfile.TemporaryDirectory(dir=self.folder) as traces:
            own.append(f"--sched-trace-path={traces}/trace.jsonl")
            stack = _stack(
                model, self.folder, *own, *flags, num_engines=num_engines, environment=self.environment
            )
            async with stack as started:
                yield started
            self._replay(sorted(Path(traces).iterdir()))

    def _replay(self, traces: Sequence[Path]) -> None:
        runs = [run for trace in traces for run in replay_file(trace)]
        differences = [run.difference for run in runs if run.difference is not None]
        row: Row = {
            "model": self.name,
            "proposer": self.proposer,
            "variant": "replay",
            "runs": len(runs),
            "steps": sum(run.num_steps for run in runs),
            "preemptions": sum(run.num_preemptions for run in runs),
            "equal": len(runs) - len(differences),
        }
        self.cells.rows.append(row)
        print(dict(row), file=sys.stderr, flush=True)
        cell = f"{self.name}, {self.proposer}, replay"
        self.cells.shortfalls += [f"{cell}: {difference}" for difference in differences]
        if not runs:
            self.cells.shortfalls.append(f"{cell}: no trace")

    async def _compare(
        self,
        variant: str,
        fleet: Fleet,
        channel: grpc.aio.Channel,
        cases: Sequence[Case],
        at_once: int = _AT_ONCE,
        killed: ServiceProcess | None = None,
    ) -> None:
        counted = [engine for engine in fleet.of("engine") if engine is not killed]
        before = await _num_drafts(counted)
        began_at = time.monotonic()
        strike = None if killed is None else partial(kill_amid, killed, len(cases) // 8, _MIN_IN_FLIGHT)
        records = await send(channel, cases, f"{self.proposer} {variant}", at_once, strike)
        seconds = time.monotonic() - began_at
        drafts, accepted = (
            after - earlier for after, earlier in zip(await _num_drafts(counted), before, strict=True)
        )
        expected = self.expected.get(variant, self.expected["together"])
        found = _of_records(records)
        num_outputs = sum(map(len, expected.values()))
        num_equal = sum(
            one == other
            for key, outputs in expected.items()
            for one, other in zip(outputs, found.get(key, ()), strict=False)
        )
        events = [event for record in records for _, event in record.events]
        ends = [event.finished.stats for event in events if event.HasField("finished")]
        row: Row = {
            "model": self.name,
            "proposer": self.proposer,
            "variant": variant,
            "outputs": num_outputs,
            "equal": num_equal,
            "drafts": drafts,
            "accepted": accepted,
            "preempted": sum(stats.num_preemptions > 0 for stats in ends),
            "moved": sum(stats.num_migrations > 0 for stats in ends),
            "seconds": round(seconds, 1),
        }
        self.cells.rows.append(row)
        print(dict(row), file=sys.stderr, flush=True)
        cell = f"{self.name}, {self.proposer}, {variant}"
        may_be_idle = self.cells.options.draft_limit == "gain"
        for is_kept, what in (
            (num_equal == num_outputs, f"{num_equal} of {num_outputs} outputs are equal"),
            (may_be_idle or accepted > 0, "no draft was accepted"),
            (may_be_idle or accepted < drafts, "no draft was rejected"),
            (variant != "preempted" or row["preempted"], "no request was preempted"),
            (killed is None or row["moved"], "no request moved"),
        ):
            if not is_kept:
                self.cells.shortfalls.append(f"{cell}: {what}")


@contextlib.asynccontextmanager
async def _stack(
    model: Path,
    folder: Path,
    *flags: str,
    num_engines: int = 1,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[Fleet, grpc.aio.Channel]]:
    """Engines and a frontend that knows them, without a coordinator."""
    with tempfile.TemporaryDirectory(dir=folder) as logs:
        async with Fleet(Path(logs)) as fleet:
            common = (str(model), *_ENGINE_FLAGS)
            for index in range(num_engines):
                fleet.add(ServicePlan("engine", index, (*common, *flags), environment or {}))
            known = [f"--engine={engine.address}" for engine in fleet.of("engine")]
            frontend = fleet.add(ServicePlan("frontend", 0, (*known, "--text-workers=1", "--drain-lag-s=0")))
            await fleet.start()
            await fleet.until_routed()
            async with open_channel(frontend.address, profile="public") as channel:
                yield fleet, channel


def _make_checkpoints(model: Path, texts: Sequence[Sequence[int]], folder: Path, num_steps: int) -> None:
    """Make the checkpoints in a process of its own, which needs much memory."""
    folder.mkdir()
    (folder / "texts.json").write_text(json.dumps([list(text) for text in texts]))
    command = [sys.executable, "-m", "tests.acceptance.rig.draft_checkpoints", f"--steps={num_steps}"]
    subprocess.run([*command, str(model), str(folder / "texts.json"), str(folder)], check=True)


def _constrained(case: Case) -> Case:
    constrained = changed(case)
    constrained.sampling.structured_output.regex = _LANGUAGE
    return constrained


async def _answers(channel: grpc.aio.Channel, cases: Sequence[Case], at_once: int) -> Answers:
    return _of_records(await send(channel, cases, "without drafts", at_once))


def _of_records(records: Sequence[StreamRecord]) -> Answers:
    """Answers of the streams that did not fail, by key."""
    for record in records:
        if record.code is not grpc.StatusCode.OK:
            print(f"{record.request_id}: {record.code} {record.details}", file=sys.stderr)
    return {record.case.key: outputs_of(record) for record in records if record.code is grpc.StatusCode.OK}


def _distinct_ids(answers: Answers) -> set[int]:
    return {token for outputs in answers.values() for output in outputs for token in output.token_ids}


async def _num_drafts(engines: Sequence[ServiceProcess]) -> tuple[int, int]:
    """Drafts that were verified, and those that were accepted."""
    found = [await engine.status() for engine in engines]
    names = ("num_drafts", "num_accepted_drafts")
    drafts, accepted = (sum(int(status.get(name, 0)) for status in found) for name in names)
    return drafts, accepted
