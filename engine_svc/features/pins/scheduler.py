"""Pins blocks of turns that end, as long as their tools are expected to run, and blocks for operators."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from engine_svc.cache.kv_cache import KVCache
from engine_svc.config import EngineConfig
from engine_svc.core.errors import RequestFailed
from engine_svc.core.extras import Extra
from engine_svc.core.request import FinishReason, Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.pins.estimator import (
    FixedTtl,
    LogNormalTtl,
    PinValue,
    StepSeconds,
    ToolGaps,
    TtlRule,
    UtilityTtl,
)
from engine_svc.features.pins.extras import FinishHint, JobTurn, ListPins, PinPrefix, ReleasePins
from engine_svc.features.pins.options import POLICY
from engine_svc.features.pins.pin_table import Pin, PinTable
from engine_svc.loop.protocols import EngineScheduler
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature
from triptych_kit.clock import Clock
from triptych_kit.telemetry.metrics import Metrics

# Jobs of which the last turn is remembered; the least recently used is forgotten.
MAX_JOBS = 65_536
# How long blocks stay for a hint of the tool that a turn has called.
PROVISIONAL_S = 0.25
_GAP_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)
# How fast the share of time in which blocks are short is forgotten.
_PRESSURE_S = 10.0
# Of the newest value in a mean.
_NEWEST_SHARE = 0.05


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature | None:
    if config.scheduling_policy != POLICY:
        return None
    rules: dict[str, Callable[[], TtlRule]] = {
        "utility": UtilityTtl,
        "lognormal": lambda: LogNormalTtl(config.pin_ttl_s, config.pin_threshold_s),
        "fixed": lambda: FixedTtl(config.pin_ttl_s),
    }
    return JobPins(
        rules[config.pin_ttl_rule](),
        context.clock,
        context.metrics,
        gives_pins_first=config.continuum_pressure == "pins-first",
        lease_ttl_s=config.pin_ttl_s,
        max_leased_share=config.max_pinned_share,
        max_tenant_leased_share=config.max_tenant_pinned_share,
    )


@dataclass(slots=True)
class _Job:
    """A job that has requests or had some lately.

    ended_at, ended_id: the last turn to end, whose next one has not come yet; None, "": there is none.
    tool: that it called; "": not known.
    """

    num_open: int = 0  # requests that have not ended
    num_waiting: int = 0  # of these, those that have not run yet
    ended_at: float | None = None
    ended_id: str = ""
    tool: str = ""

    def forget_turn(self) -> None:
        self.ended_at, self.ended_id, self.tool = None, "", ""


class JobPins(SchedulerFeature):
    """One pin a job, of the blocks that its last turn has computed, and pins of operators."""

    def __init__(
        self,
        rule: TtlRule,
        clock: Clock,
        metrics: Metrics,
        *,
        gives_pins_first: bool = False,
        lease_ttl_s: float = 10.0,
        max_leased_share: float = 0.5,
        max_tenant_leased_share: float = 0.25,
    ) -> None:
        """lease_ttl_s: of an operator's pin that names no time.  max_leased_share: of the blocks.

        max_tenant_leased_share: the same of pins for one tenant.
        """
        self._rule = rule
        self._clock = clock
        self._gives_pins_first = gives_pins_first
        self._lease_ttl_s = lease_ttl_s
        self._max_leased_share = max_leased_share
        self._max_tenant_leased_share = max_tenant_leased_share
        self._pins = PinTable(metrics, self._is_awaited)
        self._gaps = ToolGaps()
        self._load = _Load()
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._turns: dict[Request, JobTurn] = {}  # that have not ended
        self._waiting: dict[str, Request] = {}  # those that have not run, by id
        self._job_of: dict[str, str] = {}  # by id of the last turn that has ended
        self._gap_s = metrics.histogram(
            "triptych_engine_tool_gap_seconds",
            "Time from the end of a job's turn to the arrival of its next one.",
            _GAP_BUCKETS,
        ).of()

    def wrap(self, scheduler: EngineScheduler, kv_cache: KVCache) -> EngineScheduler:
        self._pins.kv_cache = kv_cache
        return scheduler

    def on_add(self, request: Request) -> None:
        # Taken off the request: no stage of a rank reads it.
        turn = request.extras.pop(JobTurn, None)
        if turn is None:
            return
        job = self._jobs.setdefault(request.job, _Job())
        self._jobs.move_to_end(request.job)
        job.num_open += 1
        job.num_waiting += 1
        self._turns[request] = turn
        self._waiting[request.request_id] = request
        if job.ended_at is not None:
            # What a client sends on within a session is no answer of a tool.
            if job.ended_id != request.request_id:
                gap_s = max(0.0, request.timeline.queued_at - job.ended_at)
                self._gaps.add(request.job, job.tool, gap_s)
                self._gap_s.observe(gap_s)
            self._forget_turn(job)
        self._forget_jobs()

    def on_step(self, now: float) -> float | None:
        self._load.note_step(now)
        return self._pins.expire(now)

    def on_plan(self, plan: StepPlan) -> None:
        now = self._clock.now()
        self._load.begin_step(plan.total_num_tokens, len(plan.request_ids), now)
        for admitted in plan.admitted:
            request = self._waiting.pop(admitted.request_id, None)
            if request is None:
                continue
            self._jobs[request.job].num_waiting -= 1
            # What it has taken over it holds itself by now.
            if request.job in self._pins:
                self._pins.release(request.job, "used")

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        self._load.end_step(self._clock.now())

    def on_withdraw(self) -> None:
        self._load.drop_steps()

    def on_pressure(self, is_running: bool) -> bool:
        self._load.is_short = True
        # Where requests wait at all times, no pin would last until its turn if they took pins as well.
        return is_running and self._gives_pins_first and self._pins.give_up()

    def on_exhausted(self) -> bool:
        return self._pins.give_up()

    def on_reset(self) -> None:
        self._pins.clear()

    def on_finish(self, request: Request) -> None:
        num_blocks = sum(len(table.block_ids) - table.num_released for table in request.block_tables)
        self._load.note_size(num_blocks)
        turn = self._turns.pop(request, None)
        if turn is None:
            return
        job = self._jobs[request.job]
        job.num_open -= 1
        if self._waiting.pop(request.request_id, None) is not None:
            job.num_waiting -= 1
            self._pins.note_unawaited()
        ended_at = request.timeline.finished_at
        if ended_at is None or not _has_answered(request):
            return
        self._forget_turn(job)
        if turn.is_last:
            if request.job in self._pins:
                self._pins.release(request.job, "released")
            return
        job.ended_at, job.ended_id, job.tool = ended_at, request.request_id, turn.tool
        self._job_of[request.request_id] = request.job
        num_tokens = request.num_prompt_tokens if turn.has_siblings else request.num_tokens
        # Without the tool its time is not known before the hint.
        ttl_s = self._ttl_s(request.job, turn.tool, num_tokens, num_blocks) if turn.tool else PROVISIONAL_S
        if ttl_s > 0:
            self._pin(request, turn, ended_at + ttl_s, num_tokens)

    def on_note(self, request_id: str, note: Extra, now: float) -> None:
        match note:
            case FinishHint():
                self._take_hint(request_id, note)
            case PinPrefix():
                self._lease(note, now)
            case ReleasePins():
                self._release_pins(note)
            case ListPins():
                pins = sorted(self._pins, key=lambda pin: pin.until)
                note.pins = [pin.info(now) for pin in pins]

    def _take_hint(self, request_id: str, note: FinishHint) -> None:
        """The pin stays as long as its tool is expected to run, or not at all."""
        name = self._job_of.pop(request_id, None)
        if name is None:
            return
        job, pin = self._jobs[name], self._pins.get(name)
        ended_at, job.tool = job.ended_at, note.tool or ""
        if note.tool == "":
            # What comes next is not the end of a tool.
            job.forget_turn()
        if pin is None or ended_at is None:
            return
        ttl_s = 0.0 if note.tool == "" else self._ttl_s(name, job.tool, pin.num_tokens, pin.num_blocks)
        if ttl_s > 0:
            self._pins.move(pin, ended_at + ttl_s)
        else:
            self._pins.release(name, "released")

    def _ttl_s(self, job: str, tool: str, num_tokens: int, num_blocks: int) -> float:
        value = self._load.value_of(num_tokens, num_blocks)
        return self._rule.ttl_s(self._gaps.expected(job, tool), value)

    def _pin(self, request: Request, turn: JobTurn, until: float, num_tokens: int) -> None:
        pins, key = self._pins, request.job
        if key in pins:
            pins.release(key, "replaced")
        num_blocks = pins.cache.retain(key, request, num_tokens)
        if num_blocks:
            pins.add(Pin(pins.new_id(), key, until, num_tokens, num_blocks, turn.job_id, turn.tenant))

    def _lease(self, call: PinPrefix, now: float) -> None:
        """Pin blocks for an operator."""
        pins = self._pins
        # A hit leaves a token to compute, which is none of these.
        tokens = [*call.token_ids, 0]
        prefix = Request("", tokens, len(tokens), SamplingParams(1), cache_salt=call.cache_salt)
        block_ids = pins.cache.match_prefix(prefix).held_block_ids
        if not block_ids:
            call.failure = RequestFailed("FAILED_PRECONDITION", "no full block of these tokens is cached")
            return
        call.failure = self._lease_refusal(call, len(block_ids))
        if call.failure is not None:
            return
        pin_id = pins.new_id()
        pins.cache.retained.add(pin_id, block_ids)
        until = now + (call.ttl_s or self._lease_ttl_s)
        pin = Pin(pin_id, pin_id, until, 0, len(block_ids), call.job_id, call.tenant, is_lease=True)
        pins.add(pin)
        call.pin = pin.info(now)

    def _lease_refusal(self, call: PinPrefix, num_blocks: int) -> RequestFailed | None:
        """Why an operator may not pin `num_blocks` beside the others; None: there is no reason."""
        leases = [pin for pin in self._pins if pin.is_lease]
        parts = [("--max-pinned-share", self._max_leased_share, leases)]
        if call.tenant:
            of_tenant = [pin for pin in leases if pin.tenant == call.tenant]
            parts.append(("--max-tenant-pinned-share", self._max_tenant_leased_share, of_tenant))
        for option, share, counted in parts:
            num_leased = sum(pin.num_blocks for pin in counted)
            limit = int(share * self._pins.cache.num_total_blocks)
            if num_leased + num_blocks > limit:
                message = (
                    f"token_ids have {num_blocks} cached blocks, beside {num_leased} that are pinned, "
                    f"the limit is {limit}, {option} of the blocks"
                )
                return RequestFailed("RESOURCE_EXHAUSTED", message, field="pin_blocks.token_ids")
        return None

    def _release_pins(self, call: ReleasePins) -> None:
        """Release pins for an operator."""
        released = [
            pin for pin in self._pins if call.pin_id in ("", pin.pin_id) and call.job_id in ("", pin.job_id)
        ]
        call.num_pins = len(released)
        call.num_blocks = sum(self._pins.release(pin.key, "released") for pin in released)

    def _is_awaited(self, key: str) -> bool:
        """Whether a turn of the job waits."""
        job = self._jobs.get(key)
        return job is not None and job.num_waiting > 0

    def _forget_turn(self, job: _Job) -> None:
        self._job_of.pop(job.ended_id, None)
        job.forget_turn()

    def _forget_jobs(self) -> None:
        """Forget jobs beyond the limit, except those with requests or a pin."""
        for _ in range(len(self._jobs) - MAX_JOBS):
            name, job = next(iter(self._jobs.items()))
            self._jobs.move_to_end(name)
            if not job.num_open and name not in self._pins:
                self._job_of.pop(job.ended_id, None)
                del self._jobs[name]


def _has_answered(request: Request) -> bool:
    """Whether the request ended with a whole answer."""
    if request.finish_reason is FinishReason.ABORT:
        return request.abort_cause == "stop_string"
    return request.finish_reason is not FinishReason.ERROR


class _Mean:
    """A mean of values, the newest counting most; None before any."""

    def __init__(self) -> None:
        self.value: float | None = None

    def note(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _NEWEST_SHARE * (value - self.value)


class _Load:
    """The value of time and blocks at present, by steps and requests."""

    def __init__(self) -> None:
        self.is_short = False  # a request found no blocks since the last step
        self._step_seconds = StepSeconds()
        self._pressure = 0.0  # share of the time in which blocks are short
        self._mean_size = _Mean()  # of requests at their end, in blocks
        self._stepped_at: float | None = None
        self._in_flight: deque[tuple[int, int, float]] = deque()  # tokens, rows and beginnings of steps
        self._ended_at = -math.inf

    def note_step(self, now: float) -> None:
        if self._stepped_at is not None:
            share = 1 - math.exp((self._stepped_at - now) / _PRESSURE_S)
            self._pressure += share * (self.is_short - self._pressure)
        self._stepped_at, self.is_short = now, False

    def begin_step(self, num_tokens: int, num_rows: int, now: float) -> None:
        self._in_flight.append((num_tokens, num_rows, now))

    def end_step(self, now: float) -> None:
        num_tokens, num_rows, began_at = self._in_flight.popleft()
        self._step_seconds.note(num_tokens, num_rows, now - max(began_at, self._ended_at))
        self._ended_at = now

    def drop_steps(self) -> None:
        self._in_flight.clear()

    def note_size(self, num_blocks: int) -> None:
        self._mean_size.note(num_blocks)

    def value_of(self, num_tokens: int, num_blocks: int) -> PinValue:
        """The value of a pin with which a prompt of `num_tokens` need not be computed again."""
        # While blocks are short, those of a pin keep others from running, as many as would fit into them.
        num_rows = self._pressure * num_blocks / max(1.0, self._mean_size.value or 0.0)
        return PinValue(
            num_tokens * self._step_seconds.per_token, num_rows * self._step_seconds.saved_per_row
        )
