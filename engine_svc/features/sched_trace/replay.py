"""Replays a trace: a new scheduler of the same setup gets the same calls, and has to decide the same.

The new scheduler is traced as well, and its records are compared with those of the file.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.errors import InvalidTransition
from engine_svc.core.extras import Extra, Extras
from engine_svc.core.request import FinishReason, Request, RequestOutput, Verdict
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.sched_trace.records import (
    DECISION,
    FORMAT,
    PREFIX_CACHE,
    SNAPSHOT,
    Record,
    Setup,
    encode,
    output_records,
    read_request,
    read_segment,
    read_verdict,
)
from engine_svc.features.sched_trace.retention import RecordedRetention
from engine_svc.features.sched_trace.scheduler import TracedScheduler
from engine_svc.scheduler.config import PauseState
from engine_svc.scheduler.feature import SchedulerFeature
from engine_svc.scheduler.scheduler import Scheduler

# What a replay takes from a record and does not compare. A killed run may end with a snapshot whose step is
# missing.
GIVEN = ("at", "events", "retention", "trace")


class BadTrace(ValueError):
    """A file that is no trace, or one of a format that is not known here."""


class ReplayedCore(Protocol):
    """The scheduling side of an engine."""

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def kv_cache(self) -> KVCache: ...


@dataclass(slots=True)
class Run:
    """One run of an engine in a trace, and what its replay came to. difference: the first; None: none."""

    setup: Setup
    version: str
    num_steps: int = 0
    num_requests: int = 0
    num_preemptions: int = 0
    num_hits: int = 0
    num_hit_tokens: int = 0
    is_cut: bool = False  # the file ends within a line, as that of an engine that was killed may
    difference: str | None = None


def read_lines(lines: Iterable[bytes]) -> Iterator[Record | None]:
    """The records of a file; None for an incomplete line, the last of a run. Raises BadTrace."""
    number, is_incomplete = 0, False
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        is_first = isinstance(record, dict) and "trace" in record
        if is_incomplete and not is_first:
            raise BadTrace(f"line {number - 1} is not JSON")
        is_incomplete = record is None
        if not (is_first or is_incomplete) and (number == 1 or not isinstance(record, dict)):
            raise BadTrace(f"line {number} is no record of a trace")
        yield record
    if is_incomplete and number == 1:
        raise BadTrace("line 1 is not JSON")


BuildCore = Callable[[Setup, Sequence[SchedulerFeature]], ReplayedCore]


def replay(records: Iterable[Record | None], build: BuildCore) -> Iterator[Run]:
    """Replay each run of a trace up to its first difference. Raises BadTrace."""
    playback: Playback | None = None
    for number, record in enumerate(records, start=1):
        is_first = record is not None and "trace" in record
        if is_first and playback is not None:
            yield playback.end()
        try:
            if record is not None and is_first:
                playback = Playback(record["trace"], build)
            if record is None:
                # An engine that was killed within the first line of its run leaves no run.
                if playback is not None:
                    playback.run.is_cut = True
            elif playback is None:
                raise BadTrace("the first record has no configuration")
            elif playback.run.difference is None:
                playback.play(record)
        except (LookupError, TypeError, AttributeError, ValueError, InvalidTransition) as error:
            step = 0 if record is None else record.get("step")
            cause = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise BadTrace(f"record {number} of step {step} cannot be replayed ({cause})") from error
    if playback is not None:
        yield playback.end()


class Playback:
    """Gives the calls of one run to a new scheduler, and compares what that records."""

    def __init__(self, header: Record, build: BuildCore) -> None:
        if header.get("format") != FORMAT:
            raise BadTrace(f"the format of the trace is {header.get('format')}, this version reads {FORMAT}")
        setup = Setup.read(header["config"])
        self._verdicts = _RecordedVerdicts()
        self._retention = RecordedRetention()
        core = build(setup, [self._verdicts, self._retention])
        self._retention.retained = core.kv_cache.retained
        self.run = Run(setup, str(header.get("version", "")))
        self._recorded: deque[Record] = deque()  # of the file, not compared yet
        self._collector = _Collector()
        self._scheduler = TracedScheduler(core.scheduler, core.kv_cache, setup, header, self._collector)
        self._plans: dict[int, StepPlan] = {}  # in flight
        self._step = 0

    def play(self, record: Record) -> None:
        """Take the next record of the file, and run what it says."""
        self._recorded.append(record)
        kind = record["kind"]
        if kind == SNAPSHOT:
            # Steps in which nothing happened have no records.
            while self._step < record["step"] - 1 and not self._schedule(record["at"]):
                continue
            for event in record["events"]:
                self._retention.take(event.get("retention", ()))
                self._apply(event)
                # A reset has released blocks by itself.
                self._retention.take(())
        elif kind == PREFIX_CACHE:
            self.run.num_hits += record["local_hit_tokens"] > 0
            self.run.num_hit_tokens += record["local_hit_tokens"]
        elif kind == DECISION:
            self.run.num_steps += 1
            self.run.num_preemptions += len(record["preempted_req_ids"])
            self._retention.take(record.get("retention", ()))
            self._schedule(self._recorded[0]["at"])
            self._compare()
        else:
            raise BadTrace(f"a record is of the kind {kind}, which is not known here")

    def end(self) -> Run:
        """Compare the state at the end."""
        # Without its decision, the end of a step cannot be compared.
        self._recorded = deque(record for record in self._recorded if record["kind"] == SNAPSHOT)
        if self.run.difference is None and self._recorded:
            self._scheduler.close()
            self._compare()
        return self.run

    def _schedule(self, now: float) -> bool:
        """Plan a step; False if it is one in which nothing happens."""
        plan = self._scheduler.schedule(now)
        self._step = plan.step_number
        if plan.request_ids:
            self._plans[plan.step_number] = plan
        return bool(plan.request_ids or plan.preempted)

    def _apply(self, event: Record) -> None:
        scheduler, at = self._scheduler, event.get("at", 0.0)
        match event["op"]:
            case "add":
                self.run.num_requests += 1
                scheduler.add(read_request(event["request"]))
            case "extend":
                self._check(event, scheduler.extend(event["id"], read_segment(event), at))
            case "close":
                self._check(event, scheduler.extend(event["id"], None, at))
            case "cancel_turn":
                scheduler.cancel_turn(event["id"])
            case "unblock":
                scheduler.unblock(event["id"], event["name"])
            case "abort":
                reason = FinishReason(event.get("reason", "abort"))
                self._check(event, scheduler.abort(event["ids"], at, event.get("cause", ""), reason))
            case "pause":
                scheduler.set_pause(PauseState(event["state"]))
            case "reset_prefix_cache":
                result = scheduler.reset_prefix_cache(at, reset_running=event["running"])
                self._note_difference("the result of reset_prefix_cache", event["result"], result)
            case "withdraw":
                self._plans.clear()
                scheduler.withdraw(at)
            case "idle":
                scheduler.on_idle(at)
            case "note":
                scheduler.note(event["id"], NO_NOTE, at)
            case "restrict":
                scheduler.restrict(event["only"], at, event["max_num_tokens"])
            case "update":
                plan = self._plans.pop(event["for_step"])
                self._verdicts.by_id = event.get("verdicts", {})
                self._check(event, scheduler.update(plan, _as_result(event, plan), at))
            case op:
                raise BadTrace(f"an event is {op}, which is not known here")

    def _check(self, event: Record, outputs: Sequence[RequestOutput]) -> None:
        if "outputs" in event:
            what = f"the outputs of {event['op']}"
            self._note_difference(what, event["outputs"], output_records(outputs))

    def _compare(self) -> None:
        """Compare what was recorded up to here. What a record of the file does not have is not compared."""
        replayed, self._collector.records = self._collector.records, []
        for record, other in zip(self._recorded, [*replayed, *[{}] * len(self._recorded)], strict=False):
            for name, value in record.items():
                if name not in GIVEN:
                    self._note_difference(f"{record['kind']}.{name}", value, other.get(name))
        if len(replayed) > len(self._recorded):
            self._note_difference("the number of records", len(self._recorded), len(replayed))
        self._recorded.clear()

    def _note_difference(self, what: str, recorded: object, replayed: object) -> None:
        # Compared as text, as the order of rows is a decision, too.
        if self.run.difference is None and encode(recorded) != encode(replayed):
            step = self._recorded[0]["step"]
            self.run.difference = f"step {step}: {what} is {encode(replayed)} instead of {encode(recorded)}"


# In the place of what a frontend has said, of which no feature is there.
NO_NOTE = Extra()


class _RecordedVerdicts(SchedulerFeature):
    """Decides as the features of the engine did. by_id: of the present update."""

    def __init__(self) -> None:
        self.by_id: Record = {}

    def on_add(self, request: Request) -> None:
        request.needs_verdict = True

    def verdict(self, request: Request, output: RequestOutput, extras: Extras) -> Verdict | None:
        record = self.by_id.get(request.request_id)
        return None if record is None else read_verdict(record)


class _Collector:
    """Takes the records of the replay."""

    is_open = True

    def __init__(self) -> None:
        self.records: list[Record] = []

    def put(self, make_records: Callable[[], Sequence[Record]], num_items: int) -> None:
        self.records += make_records()

    def close(self) -> None:
        pass


def _as_result(event: Record, plan: StepPlan) -> StepResult:
    sampled, faults = event["sampled"], event.get("faults", {})
    return StepResult(
        plan.step_number,
        [list(sampled.get(request_id, ())) for request_id in plan.request_ids],
        event.get("drafts", {}),
        failed={row: faults[name] for row, name in enumerate(plan.request_ids) if name in faults},
        num_drafts=event.get("num_drafts", []),
    )
