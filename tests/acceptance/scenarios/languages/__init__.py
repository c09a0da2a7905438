"""Answers in many languages at temperature 1: they are texts of them, and the same whatever happens to them.

    python -m tests.acceptance languages --public MASKBENCH --json benchmarks/results/languages.json
    python -m tests.acceptance languages --model FOLDER:TEMPLATE.jinja --disturbed 64

Engines and a frontend serve each model in processes of their own. An answer has to be accepted by a
validator that knows no grammar backend, or be marked as incomplete and have a completion that is accepted;
90 % have to finish. The same requests are then sent one at a time, to an engine with few KV blocks, to two
ranks, to two engines of which each is killed once, with n = 4, with log probabilities and as chats: the ids
have to be those of an undisturbed engine with 64 requests at once. Two ranks round differently and are
compared with themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import grpc.aio

from benchmarks.report import Report, Row
from benchmarks.rig.history import OutputSeen, outputs_of
from benchmarks.rig.processes import Fleet, ServicePlan
from benchmarks.rig.streams import Case, Kind, StreamRecord
from frontend_svc.generation.preprocess import child_seed
from tests.acceptance.rig.languages import Completions, Language, make_languages
from tests.acceptance.scenarios.languages.answers import changed, chat, kill_amid, make_cases, send
from tests.acceptance.scenarios.languages.models import Model, make_models
from triptych.common.v1 import output_pb2
from triptych_kit.channel import open_channel

LEAST_FINISHED = 0.9
_AT_ONCE = 64
_NUM_OUTPUTS = 4
_NUM_LOGPROBS = 3
_MIN_IN_FLIGHT = 24
_ENGINE_FLAGS = ("--num-threads=1", "--max-num-batched-tokens=256", f"--max-num-seqs={_AT_ONCE}")

Answers = Mapping[int, Sequence[OutputSeen]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        action="append",
        help="byte-level, SentencePiece, embedded (default: these), or FOLDER:TEMPLATE of one that chats",
    )
    parser.add_argument("--public", type=Path, help="folder of MaskBench: half of the schemas are its own")
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--patterns", type=int, default=100)
    parser.add_argument("--grammars", type=int, default=50)
    parser.add_argument("--disturbed", type=int, help="requests of each disturbed run; default: all")
    parser.add_argument("--variant", action="append", help="of the disturbed runs; default: all")
    parser.add_argument("--seed", type=int, default=33)


def run(options: argparse.Namespace) -> Report:
    languages = make_languages(
        options.schemas, options.patterns, options.grammars, public=options.public, seed=options.seed
    )
    report = _Results()
    with tempfile.TemporaryDirectory() as folder:
        names = options.model or ["byte-level", "SentencePiece", "embedded"]
        for model in make_models(names, Path(folder), options.seed):
            asyncio.run(_run_model(model, languages, options, report, Path(folder)))
    settings = {
        name: getattr(options, name) for name in ("schemas", "patterns", "grammars", "disturbed", "seed")
    }
    settings |= {"public": options.public is not None, "at_once": _AT_ONCE}
    return Report("languages", settings, [*report.answers, *report.variants], report.shortfalls)


@dataclass
class _Results:
    answers: list[Row] = field(default_factory=list)
    variants: list[Row] = field(default_factory=list)
    shortfalls: list[str] = field(default_factory=list)

    def add_variant(self, row: Row, *, had_effect: bool = True) -> None:
        self.variants.append(row)
        print(dict(row), file=sys.stderr, flush=True)
        name = f"{row['model']}, {row['variant']}"
        if row["equal"] != row["outputs"]:
            self.shortfalls.append(f"{name}: {row['equal']} of {row['outputs']} outputs have the same ids")
        if not had_effect:
            self.shortfalls.append(f"{name}: nothing happened to the requests")


async def _run_model(
    model: Model, languages: Sequence[Language], options: argparse.Namespace, results: _Results, folder: Path
) -> None:
    chosen = options.variant or [*_VARIANTS]
    async with _stack(model, folder) as (_, channel):
        cases = await make_cases(channel, model, languages)
        began_at = time.monotonic()
        records = await send(channel, cases, "undisturbed", _AT_ONCE)
        print(f"{model.name}: {time.monotonic() - began_at:.0f} s", file=sys.stderr, flush=True)
        answers = _answers(records)
        _judge(model, languages, records, results)
        few = cases[: options.disturbed]
        for name in ("alone", "n = 4", "logprobs", "chat"):
            if name in chosen:
                await _VARIANTS[name](_Run(model, languages, few, answers, results, folder, channel))
    for name in ("preempted", "killed", "tp 2"):
        if name in chosen:
            await _VARIANTS[name](_Run(model, languages, few, answers, results, folder, None))


@dataclass(frozen=True)
class _Run:
    model: Model
    languages: Sequence[Language]
    cases: Sequence[Case]
    expected: Answers
    results: _Results
    folder: Path
    shared: grpc.aio.Channel | None  # to the undisturbed engine

    @property
    def channel(self) -> grpc.aio.Channel:
        if self.shared is None:
            raise ValueError("this variant has a stack of its own")
        return self.shared

    def compare(self, name: str, answers: Answers, expected: Answers, began_at: float, **facts: int) -> Row:
        """Ids, text and end of each output; an answer that is missing has failed."""
        pairs = [
            (output, answers.get(key, ())[index : index + 1])
            for key, outputs in expected.items()
            for index, output in enumerate(outputs)
        ]
        same = [found for output, found in pairs if found and _visible(found[0]) == _visible(output)]
        for output, found in pairs:
            if not found or _visible(found[0]) != _visible(output):
                print(
                    f"{name} differs: {output.text!r} {found[0].text if found else None!r}", file=sys.stderr
                )
        return {
            "model": self.model.name,
            "variant": name,
            "outputs": len(pairs),
            "equal": len(same),
            "seconds": time.monotonic() - began_at,
            "preempted": facts.get("preempted"),
            "moved": facts.get("moved"),
            "cached": facts.get("cached"),
        }

    def of(self, answers: Answers) -> Answers:
        """Of the cases of this run alone."""
        return {case.key: answers[case.key] for case in self.cases if case.key in answers}


async def _alone(run: _Run) -> None:
    began_at = time.monotonic()
    records = await send(run.channel, run.cases, "alone", 1)
    row = run.compare("alone", _answers(records), run.of(run.expected), began_at)
    run.results.add_variant(row)


async def _several(run: _Run) -> None:
    """Beside requests of one output each, with the seeds that outputs of several get."""
    began_at = time.monotonic()
    singles = [
        changed(case, key=case.key * _NUM_OUTPUTS + index, seed=child_seed(case.sampling.seed, index))
        for case in run.cases
        for index in range(1, _NUM_OUTPUTS)
    ]
    others = _answers(await send(run.channel, singles, "singles", _AT_ONCE))
    expected = {
        key: [
            *outputs,
            *(others[key * _NUM_OUTPUTS + index][0] for index in range(1, _NUM_OUTPUTS)),
        ]
        for key, outputs in run.of(run.expected).items()
    }
    several = [changed(case, kind=Kind.SEVERAL, n=_NUM_OUTPUTS) for case in run.cases]
    answers = _answers(await send(run.channel, several, "several", _AT_ONCE // _NUM_OUTPUTS))
    run.results.add_variant(run.compare("n = 4", answers, expected, began_at))


async def _logprobs(run: _Run) -> None:
    began_at = time.monotonic()
    cases = [changed(case, kind=Kind.LOGPROBS, logprobs=_NUM_LOGPROBS) for case in run.cases]
    answers = _answers(await send(run.channel, cases, "logprobs", _AT_ONCE))
    row = run.compare("logprobs", answers, run.of(run.expected), began_at)
    has_all = all(
        len(output.logprobs) == len(output.token_ids) for outputs in answers.values() for output in outputs
    )
    run.results.add_variant(row, had_effect=has_all)


async def _chat(run: _Run) -> None:
    if not run.model.chat_template:
        return
    began_at = time.monotonic()
    answers = await chat(run.channel, run.cases, run.languages, _AT_ONCE)
    run.results.add_variant(
        run.compare("chat", {key: [seen] for key, seen in answers.items()}, run.of(run.expected), began_at)
    )


async def _preempted(run: _Run) -> None:
    async with _stack(run.model, run.folder, *_few_blocks(run.model)) as (_, channel):
        began_at = time.monotonic()
        records = await send(channel, run.cases, "preempted", _AT_ONCE)
        num_preempted = sum(ended.stats.num_preemptions > 0 for ended in _ends(records))
        row = run.compare(
            "preempted",
            _answers(records),
            run.of(run.expected),
            began_at,
            preempted=num_preempted,
            cached=_num_cached(records),
        )
    run.results.add_variant(row, had_effect=num_preempted > 0)


async def _killed(run: _Run) -> None:
    """Each engine once, in the middle of all requests."""
    async with _stack(run.model, run.folder, num_engines=2) as (fleet, channel):
        for engine in fleet.of("engine"):
            began_at = time.monotonic()
            strike = partial(kill_amid, engine, len(run.cases) // 3, _MIN_IN_FLIGHT)
            records = await send(channel, run.cases, f"killed {engine.name}", _AT_ONCE, strike)
            num_moved = sum(ended.stats.num_migrations > 0 for ended in _ends(records))
            row = run.compare("kill -9", _answers(records), run.of(run.expected), began_at, moved=num_moved)
            run.results.add_variant(row, had_effect=num_moved > 0)
            await fleet.start()
            await fleet.until_routed()


async def _divided(run: _Run) -> None:
    """Two ranks with everything against the same two alone; and against one process, which is only shown."""
    async with _stack(run.model, run.folder, "--tensor-parallel-size=2", *_few_blocks(run.model)) as (
        _,
        channel,
    ):
        began_at = time.monotonic()
        alone = _answers(await send(channel, run.cases, "alone", 1))
        records = await send(channel, run.cases, "together", _AT_ONCE)
        num_preempted = sum(ended.stats.num_preemptions > 0 for ended in _ends(records))
        together = _answers(records)
        row = run.compare("tp 2", together, alone, began_at, preempted=num_preempted)
    run.results.add_variant(row)
    row = run.compare("tp 2 beside one process", together, run.of(run.expected), began_at)
    run.results.variants.append(row)
    print(dict(row), file=sys.stderr, flush=True)


_VARIANTS: dict[str, Callable[[_Run], Awaitable[None]]] = {
    "alone": _alone,
    "n = 4": _several,
    "logprobs": _logprobs,
    "chat": _chat,
    "preempted": _preempted,
    "killed": _killed,
    "tp 2": _divided,
}


def _few_blocks(model: Model) -> tuple[str, ...]:
    return ("--block-size=4", f"--num-kv-blocks={model.few_blocks}")


@contextlib.asynccontextmanager
async def _stack(
    model: Model, folder: Path, *flags: str, num_engines: int = 1
) -> AsyncIterator[tuple[Fleet, grpc.aio.Channel]]:
    """Engines and a frontend that knows them, without a coordinator."""
    with tempfile.TemporaryDirectory(dir=folder) as logs:
        async with Fleet(Path(logs)) as fleet:
            for index in range(num_engines):
                fleet.add(ServicePlan("engine", index, (str(model.folder), *_ENGINE_FLAGS, *flags)))
            known = [f"--engine={engine.address}" for engine in fleet.of("engine")]
            if model.chat_template not in ("", "own"):
                known.append(f"--chat-template={model.chat_template}")
            frontend = fleet.add(ServicePlan("frontend", 0, (*known, "--text-workers=1", "--drain-lag-s=0")))
            await fleet.start()
            await fleet.until_routed()
            async with open_channel(frontend.address, profile="public") as channel:
                yield fleet, channel


def _judge(
    model: Model, languages: Sequence[Language], records: Sequence[StreamRecord], results: _Results
) -> None:
    """A row for each kind of language."""
    completions = Completions(model.vocabulary)
    counts: dict[str, dict[str, int]] = {}
    for record in sorted(records, key=lambda record: record.case.key):
        language = languages[record.case.key]
        count = counts.setdefault(
            language.kind,
            dict.fromkeys(("asked", "failed", "finished", "valid", "cut", "viable", "tokens"), 0),
        )
        count["asked"] += 1
        if record.code is not grpc.StatusCode.OK:
            count["failed"] += 1
            print(f"{language.constraint.text}: {record.code} {record.details}", file=sys.stderr)
            continue
        (seen,) = outputs_of(record)
        count["tokens"] += len(seen.token_ids)
        is_whole = seen.reason == output_pb2.FINISH_REASON_STOP
        if is_whole:
            is_right = not seen.is_incomplete and language.accepts(seen.text)
        else:
            is_length = seen.reason == output_pb2.FINISH_REASON_LENGTH
            is_right = (
                is_length
                and seen.is_incomplete
                and completions.is_viable(language, seen.token_ids, seen.text)
            )
        count["finished" if is_whole else "cut"] += 1
        count["valid" if is_whole else "viable"] += is_right
        if not is_right:
            print(f"{language.constraint.text}: {seen.reason} {seen.text!r}", file=sys.stderr)
    completions.close()
    for kind, count in sorted(counts.items()):
        share = count["finished"] / count["asked"]
        results.answers.append({"model": model.name, "kind": kind, **count, "finished_share": share})
        print(dict(results.answers[-1]), file=sys.stderr, flush=True)
        for what, whole in (("valid", "finished"), ("viable", "cut")):
            if count[what] != count[whole]:
                results.shortfalls.append(
                    f"{model.name}, {kind}: {count[what]} of {count[whole]} {whole} are {what}"
                )
        if count["failed"]:
            results.shortfalls.append(f"{model.name}, {kind}: {count['failed']} failed")
    num_finished = sum(count["finished"] for count in counts.values())
    if num_finished < LEAST_FINISHED * len(records):
        results.shortfalls.append(f"{model.name}: {num_finished} of {len(records)} finished")


def _answers(records: Sequence[StreamRecord]) -> dict[int, list[OutputSeen]]:
    """Answers of the streams that did not fail, by key."""
    failed = [record for record in records if record.code is not grpc.StatusCode.OK]
    for record in failed[:5]:
        print(f"{record.request_id}: {record.code} {record.details}", file=sys.stderr)
    return {record.case.key: outputs_of(record) for record in records if record.code is grpc.StatusCode.OK}


def _ends(records: Sequence[StreamRecord]) -> list:
    return [event.finished for record in records for _, event in record.events if event.HasField("finished")]


def _num_cached(records: Sequence[StreamRecord]) -> int:
    return sum(
        event.started.num_cached_tokens
        for record in records
        for _, event in record.events
        if event.HasField("started")
    )


def _visible(output: OutputSeen) -> tuple[object, ...]:
    return tuple(output.token_ids), output.text, output.reason, output.is_incomplete
