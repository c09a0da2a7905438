"""Runs cases on real processes, and each of their requests alone; every difference is reported in full."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from google.protobuf import text_format
from google.protobuf.message import Message

from tests.chaos.stacks import Stack, StackPlan, keep_logs
from tests.composition.answers import Answer, Refused, Stub, Whole, ask, ask_alone, is_expected
from tests.composition.draws import TinyModel
from tests.composition.faults import Scene
from tests.composition.generator import Case, Drawn, conditions_of, draw_case
from tests.composition.table import EMBEDDED, ENGINE_FLAGS, HYBRID, Condition
from triptych.api.v1 import generate_pb2
from triptych_cli.services import embedded_model
from triptych_cli.verbs.replay import replay_file

# What engines and frontends count of disturbances.
EVIDENCE = ("num_preemptions", "num_chunked_prefills", "prefix_hits", "num_moved_requests")
_ONE_STEP = ("--steps-in-flight=1",)
_NO_CACHE = ("--no-enable-prefix-caching",)
_LEAST_BLOCK = 4  # of all conditions
_TRACE = "trace*.jsonl"
_FRONTEND_FLAGS = ("--drain-lag-s=0", "--reasoning-parser=think")


@dataclass(slots=True)
class Report:
    """What came of some cases."""

    cases: list[Case] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    evidence: dict[int, Counter[str]] = field(default_factory=dict)  # by rig
    stats: Counter[str] = field(default_factory=Counter)  # of all outputs, as their clients have them
    distinct_ids: set[int] = field(default_factory=set)
    num_traces: int = 0  # of engines, replayed
    start_s: float = 0.0
    run_s: float = 0.0

    def add(self, other: Report) -> None:
        self.cases += other.cases
        self.differences += other.differences
        self.evidence |= other.evidence
        self.stats += other.stats
        self.distinct_ids |= other.distinct_ids
        self.num_traces += other.num_traces
        self.start_s += other.start_s
        self.run_s += other.run_s


async def run_rig(rig: int, seeds: Sequence[int], folder: Path, on_case: Callable[[Report], None]) -> Report:
    """Run seeds of one rig on stacks that are started once."""
    report = Report()
    began_at = time.monotonic()
    async with _started(folder, *_plans_of(conditions_of(rig), folder)) as (stack, alone):
        report.start_s = time.monotonic() - began_at
        model = TinyModel.of(stack.plan.model)
        runner = _Runner(stack, alone, report)
        for seed in seeds:
            try:
                await runner.run(draw_case(seed, model))
            except Exception as error:
                error.add_note(f"seed {seed}, logs: {keep_logs(folder, folder.name)}")
                raise
            report.run_s = time.monotonic() - began_at - report.start_s
            on_case(report)
        report.evidence[rig] = await runner.end()
    for trace in sorted(folder.rglob(_TRACE)):
        report.differences += [f"{trace}: {run.difference}" for run in replay_file(trace) if run.difference]
        report.num_traces += 1
    if report.differences:
        report.differences[0] += f"logs: {keep_logs(folder, folder.name)}"
    return report


class _Runner:
    """The two stacks of a rig, and what is found on them."""

    def __init__(self, stack: Stack, alone: Stack, report: Report) -> None:
        self._stack = stack
        self._stub = Stub(stack.channel())
        self._alone = Stub(alone.channel())
        self._report = report
        self._mending: asyncio.Task[None] | None = None
        # The newest of each life of a process.
        self._counts: dict[tuple[str, int], Counter[str]] = {}

    async def run(self, case: Case) -> None:
        async with asyncio.TaskGroup() as tasks:
            seen = tasks.create_task(self._disturbed(case))
            expected = tasks.create_task(self._undisturbed(case))
        self._report.cases.append(case)
        for index, drawn in enumerate(case.drawn):
            self._compare(case, index, drawn, seen.result()[index], expected.result()[index])

    async def end(self) -> Counter[str]:
        """What has been counted."""
        await self._mended()
        await self._note_counts()
        return sum(self._counts.values(), Counter())

    async def _disturbed(self, case: Case) -> list[Answer]:
        is_deadly = any(fault.ends_engine for fault in case.faults)
        if is_deadly:
            await self._mended()
            # Its counters end with it.
            await self._note_counts()
        requests = [drawn.request for drawn in case.drawn]
        scene = Scene(self._stack, requests, random.Random(case.seed))
        async with asyncio.TaskGroup() as strikes:
            for fault in case.faults:
                strikes.create_task(fault.strike(scene))
            answers = await asyncio.gather(
                *(ask(self._stub, drawn, scene.progress.note) for drawn in case.drawn)
            )
            scene.progress.end()
        if is_deadly:
            # Meanwhile the other engine has the next seeds for itself.
            self._mending = asyncio.create_task(self._stack.mend())
        return answers

    async def _undisturbed(self, case: Case) -> list[Answer | None]:
        """Each request that is served, one after the other."""
        return [
            None if drawn.refusals else await ask_alone(self._alone, drawn.request, drawn.added)
            for drawn in case.drawn
        ]

    async def _mended(self) -> None:
        mending, self._mending = self._mending, None
        if mending is not None:
            await mending

    async def _note_counts(self) -> None:
        for process in (*self._stack.engines, *self._stack.frontends):
            status = await process.status()
            counts = Counter({name: int(status.get(name, 0)) for name in EVIDENCE})
            self._counts[process.name, process.num_starts] = counts

    def _compare(self, case: Case, index: int, drawn: Drawn, seen: Answer, expected: Answer | None) -> None:
        wholes = [] if isinstance(seen, Refused) else seen
        self._report.stats["num_turns"] += len(wholes) if drawn.added else 0
        self._report.stats["num_kept_turns"] += sum(map(_is_kept, wholes, wholes[1:]))
        for output in itertools.chain.from_iterable(whole.outputs for whole in wholes):
            stats = output.stats
            self._report.distinct_ids.update(output.token_ids)
            self._report.stats["num_preemptions"] += stats.num_preemptions
            self._report.stats["num_migrations"] += stats.num_migrations
            self._report.stats["num_timed"] += stats.queue_ms + stats.prefill_ms + stats.decode_ms > 0
            self._report.stats["num_outputs"] += 1
        if is_expected(drawn, seen, expected):
            return
        names = ", ".join(sorted(drawn.options | case.surroundings))
        self._report.differences.append(
            f"seed {case.seed}, request {index}: {names}\n"
            f"request:\n{_shown(drawn.request)}{_shown_all([one.append for one in drawn.added])}"
            f"seen:\n{_shown_all(seen)}"
            f"expected:\n{drawn.refusals if expected is None else _shown_all(expected)}"
        )


def _is_kept(before: Whole, turn: Whole) -> bool:
    """Whether an engine has kept a turn's tokens to the last one that it had computed, not whole blocks."""
    num_computed = before.usage.num_prompt_tokens + before.usage.num_completion_tokens - 1
    return turn.started.num_cached_tokens == num_computed and num_computed % _LEAST_BLOCK > 0


def _shown_all(messages: Answer | Sequence[Message]) -> str:
    return f"{messages}\n" if isinstance(messages, Refused) else "".join(map(_shown, messages))


def _shown(message: Message) -> str:
    shown = type(message)()
    shown.CopyFrom(message)
    if isinstance(shown, generate_pb2.GenerateRequest):
        shown.embeds.embeds.ClearField("inline")
    return text_format.MessageToString(shown, use_short_repeated_primitives=True)


def _plans_of(conditions: Sequence[Condition], folder: Path) -> tuple[StackPlan, StackPlan]:
    """Two engines under these conditions that write traces, and one with those that answers depend on."""
    kept = [condition for condition in conditions if condition.is_kept]
    # Of conditions with a model of their own at most one is in a rig.
    name = next((condition.model for condition in kept if condition.model != EMBEDDED), EMBEDDED)
    model = embedded_model() if name == EMBEDDED else _make_model(name, folder / name)
    adapters = _make_adapters(folder / "adapters", model)
    if any(condition.is_quantized for condition in kept):
        model = _quantized(model, folder / "quantized")
    disturbed = StackPlan(
        tensor_parallel_size=max((condition.tensor_parallel_size for condition in kept), default=1),
        engine_flags=(
            *_ONE_STEP,
            *_engine_flags(conditions, model, adapters),
            f"--sched-trace-path={folder / _TRACE.replace('*', '')}",
        ),
        frontend_flags=_FRONTEND_FLAGS,
        model=model,
    )
    alone_flags = (*_ONE_STEP, *_NO_CACHE, *_engine_flags(kept, model, adapters))
    return disturbed, replace(disturbed, engine_flags=alone_flags, num_engines=1)


def _engine_flags(conditions: Sequence[Condition], model: Path, adapters: Path) -> list[str]:
    # The last one of a kind counts.
    flags = [*ENGINE_FLAGS, *(flag for condition in conditions for flag in condition.flags)]
    return [flag.replace("{model}", str(model)).replace("{adapters}", str(adapters)) for flag in flags]


def _make_adapters(folder: Path, model: Path) -> Path:
    # Imported here, as torch takes long to import.
    from tests.engine_svc.features.adapters.folders import write_adapter

    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    for seed, (name, rank) in enumerate({"first": 4, "second": 16, "third": 8}.items()):
        write_adapter(folder / name, model, seed=seed, rank=rank, modules=attention)
    return folder


def _make_model(name: str, folder: Path) -> Path:
    # Imported here: it takes long, and most rigs do not need it.
    from tests.system.checkpoints import make_hybrid, make_windowed_mixture

    return make_hybrid(folder, embedded_model()) if name == HYBRID else make_windowed_mixture(folder)


def _quantized(model: Path, folder: Path) -> Path:
    # Imported here, as torch takes long to import.
    from benchmarks.rig.quantized_folder import awq, write_quantized

    # Groups that two ranks share without dividing one.
    return write_quantized(model, folder, awq(group_size=32))


@asynccontextmanager
async def _started(folder: Path, *plans: StackPlan) -> AsyncIterator[list[Stack]]:
    """Stacks that start and stop side by side."""
    stacks = [Stack(plan, folder / str(number)) for number, plan in enumerate(plans)]
    for stack in stacks:
        stack.folder.mkdir(parents=True)
    try:
        await asyncio.gather(*(stack.start() for stack in stacks))
        yield stacks
    finally:
        await asyncio.gather(*(stack.stop() for stack in stacks))
