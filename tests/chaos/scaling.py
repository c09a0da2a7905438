"""Streams that do not cease while a stack grows and shrinks, and what their clients received."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio

from benchmarks.rig.history import Oracle, Violation, order_violations, outputs_of
from benchmarks.rig.streams import Case, Flow, Load, StreamRecord
from benchmarks.rig.watch import Calibration, calibrate
from tests.chaos.served import ScaleOutcome, ServedStack

# Streams that begin before and after each change, so that every size is worked with for a while.
_NUM_BETWEEN = 24
# What an engine that came is given to its first token, where the machine is as fast as it should be.
MAX_SERVED_AFTER_S = 1.0


@dataclass(slots=True)
class ScalingRun:
    """What a stack did while it was scaled."""

    changes: list[ScaleOutcome] = field(default_factory=list)
    records: list[StreamRecord] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    served_after_s: dict[str, float] = field(default_factory=dict)  # of each engine that came, by its id
    endings: list[str] = field(default_factory=list)  # of each engine that left, with its name
    num_left: int = 0

    @property
    def num_lost(self) -> int:
        """Streams that have no end."""
        return sum(record.code is None for record in self.records)

    @property
    def gaps_s(self) -> list[float]:
        """Times between two messages of one stream."""
        return [gap for record in self.records for gap in record.gaps_s]


async def record_undisturbed(channel: grpc.aio.Channel, cases: Sequence[Case]) -> tuple[Oracle, Calibration]:
    """What each case says when nothing happens, and how fast this machine is then."""
    runs = []
    # The first one warms up.
    for number in range(2):
        load = Load(label=f"undisturbed-{number}")
        load.send(channel, cases)
        runs.append(await load.finish())
    return Oracle(runs[0]), calibrate(runs[1])


async def scale_under_load(
    stack: ServedStack,
    channel: grpc.aio.Channel,
    cases: Sequence[Case],
    oracle: Oracle,
    *,
    sizes: Sequence[int],
    num_streams: int,
    is_exact: bool = True,
    label: str = "scaled",
) -> ScalingRun:
    """Bring the stack to each of `sizes` in turn while `num_streams` streams run.

    is_exact: logprobs are compared to the last bit as well; else ids, and how outputs ended.
    """
    run = ScalingRun()
    before = set(stack.ready_instants())
    flow = Flow(channel, cases, label)
    size = stack.num_engines
    async with flow.running(num_streams):
        await flow.begin_more(_NUM_BETWEEN)
        for wanted in sizes:
            run.changes.append(await stack.scale(wanted))
            run.num_left += max(0, size - wanted)
            size = wanted
            await flow.begin_more(_NUM_BETWEEN)
    run.endings = await stack.until_left(run.num_left) if run.num_left else []
    run.records = flow.load.records
    run.violations = oracle.violations(run.records) if is_exact else _differing_ids(oracle, run.records)
    ready = {id_: at for id_, at in stack.ready_instants().items() if id_ not in before}
    first = _first_tokens(flow)
    run.served_after_s = {id_: first.get(id_, float("inf")) - at for id_, at in ready.items()}
    return run


def broken_promises(run: ScalingRun, calibration: Calibration) -> list[str]:
    """What a run does not keep, in words."""
    limit_s = MAX_SERVED_AFTER_S * calibration.scale
    found = [f"scale: {change.lines[-1:]}" for change in run.changes if change.exit_code != 0]
    if run.num_lost:
        found.append(f"{run.num_lost} streams have no end")
    if run.violations:
        found.append(f"{len(run.violations)} streams are not as undisturbed: {run.violations[0]}")
    late = {id_: round(after, 3) for id_, after in run.served_after_s.items() if after > limit_s}
    if late:
        found.append(f"engines that served later than {limit_s:.2f} s after READY: {late}")
    wrong = [ending for ending in run.endings if not ending.endswith("exited with code 0")]
    if wrong or len(run.endings) != run.num_left:
        found.append(f"{run.num_left} engines were to leave with 0: {run.endings}")
    return found


def _first_tokens(flow: Flow) -> dict[str, float]:
    """When the first token of a stream that began at an engine came to its client, in s since 1970."""
    offset_s = time.time() - time.monotonic()
    first: dict[str, float] = {}
    for record in flow.load.records:
        engine_id, at = flow.engines.get(record.request_id), record.token_instants
        if engine_id is not None and at:
            first[engine_id] = min(first.get(engine_id, float("inf")), at[0] + offset_s)
    return first


def _differing_ids(oracle: Oracle, records: Sequence[StreamRecord]) -> list[Violation]:
    found = []
    for record in records:
        broken = order_violations(record)
        seen = [(output.token_ids, output.reason) for output in outputs_of(record)]
        expected = [(output.token_ids, output.reason) for output in oracle.expected(record.case.key)]
        if not broken and seen != expected:
            broken = [Violation(record.request_id, "content", f"{record.case.kind.value}: ids differ")]
        found += broken
    return found
