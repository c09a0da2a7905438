"""Jobs through a real scheduler and its cache, in the time that a model's steps would take."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.scenarios.agents.workload import Job
from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request, RequestOutput
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.pins.estimator import TtlRule
from engine_svc.features.pins.extras import FinishHint, JobTurn
from engine_svc.features.pins.scheduler import JobPins
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.feature import SchedulerFeature
from triptych_kit.clock import FakeClock
from triptych_kit.telemetry.metrics import Metrics

BLOCK_SIZE = 32
_SAMPLED_TOKEN = 7


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: base_s + token_s * tokens + read_s * tokens of context that its rows read.

    prompt_speed: how many times as fast as others the tokens of rows of several are.
    """

    base_s: float
    token_s: float
    read_s: float
    prompt_speed: float = 1.0

    def of(self, plan: StepPlan) -> float:
        num_decodes = plan.num_tokens.count(1)
        num_prompt_tokens = plan.total_num_tokens - num_decodes
        num_tokens = num_decodes + num_prompt_tokens / self.prompt_speed
        return self.base_s + self.token_s * num_tokens + self.read_s * sum(plan.num_computed_tokens)


@dataclass(frozen=True, slots=True)
class Contestant:
    """How an engine serves jobs. rule: of its pins; None: it has none."""

    name: str
    policy: str
    rule: TtlRule | None = None
    gives_pins_first: bool = False


@dataclass(slots=True)
class Outcome:
    """What became of jobs. Times are in seconds.

    completions_s: of each job, from its arrival to the end of its last turn.
    waits_s: of each turn, from its arrival to its first token.
    """

    completions_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    num_tokens: int = 0  # computed
    num_needed_tokens: int = 0  # of these, if none were computed twice


@dataclass(slots=True)
class _OpenJob:
    job: Job
    name: str
    began_at: float
    num_turns: int = 0  # that have begun
    token_ids: list[int] = field(default_factory=list)


class VirtualEngine:
    """A scheduler whose steps take no time but that of `cost`, and jobs that it serves."""

    def __init__(self, contestant: Contestant, cost: StepCost, num_blocks: int, max_model_len: int) -> None:
        self._clock = FakeClock()
        self._cost = cost
        features: list[SchedulerFeature] = []
        if contestant.rule is not None:
            features.append(
                JobPins(
                    contestant.rule,
                    self._clock,
                    Metrics("engine"),
                    gives_pins_first=contestant.gives_pins_first,
                )
            )
        core = build_core(
            SchedulerConfig(max_model_len=max_model_len),
            CacheConfig(num_blocks, (FullAttention(BLOCK_SIZE),)),
            policy=contestant.policy,
            features=features,
        )
        self._scheduler = core.scheduler
        for feature in features:
            feature.wrap(core.scheduler, core.kv_cache)
        self._arrivals: list[tuple[float, int, _OpenJob]] = []  # of turns
        self._numbers = itertools.count()
        self._open: dict[str, tuple[_OpenJob, Request]] = {}  # by id of the turn
        self._outcome = Outcome()

    def run(self, jobs: Sequence[Job], num_open: int, spread_s: float) -> Outcome:
        """Serve jobs, of which `num_open` arrive in the first `spread_s` seconds, another when one ends."""
        waiting = iter(jobs)
        for index, job in enumerate(itertools.islice(waiting, num_open)):
            self._begin(job, spread_s * index / num_open)
        while self._arrivals or self._open:
            self._add_arrived()
            plan = self._scheduler.schedule(self._clock.now()) if self._scheduler.has_work else None
            if plan is None or not plan.request_ids:
                self._wait()
                continue
            self._outcome.num_tokens += plan.total_num_tokens
            self._clock.advance(self._cost.of(plan))
            sampled = [[_SAMPLED_TOKEN] if samples else [] for samples in plan.samples]
            result = StepResult(plan.step_number, sampled)
            for output in self._scheduler.update(plan, result, self._clock.now()):
                if output.finish_reason is not None and self._end_turn(output):
                    for job in itertools.islice(waiting, 1):
                        self._begin(job, self._clock.now())
        return self._outcome

    def _begin(self, job: Job, at: float) -> None:
        self._outcome.num_needed_tokens += job.contexts[-1] - 1
        self._schedule_turn(_OpenJob(job, f"job-{next(self._numbers)}", at), at)

    def _schedule_turn(self, opened: _OpenJob, at: float) -> None:
        heapq.heappush(self._arrivals, (at, next(self._numbers), opened))

    def _wait(self) -> None:
        """Nothing can be computed until a turn arrives or a feature has to be called."""
        now = self._clock.now()
        due = [at for at, _, _ in self._arrivals[:1]]
        if (due_at := self._scheduler.on_idle(now)) is not None:
            due.append(due_at)
        if not due:
            raise RuntimeError(f"{len(self._open)} turns never end")
        self._clock.advance(max(0.0, min(due) - now))

    def _add_arrived(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._clock.now():
            at, number, opened = heapq.heappop(self._arrivals)
            turn = opened.job.turns[opened.num_turns]
            opened.num_turns += 1
            opened.token_ids += turn.input_ids
            is_last = opened.num_turns == len(opened.job.turns)
            request = Request(
                f"turn-{number}",
                list(opened.token_ids),
                len(opened.token_ids),
                SamplingParams(max_tokens=turn.num_output_tokens),
                job=opened.name,
                arrival_at=at,
                extras={JobTurn: JobTurn(is_last)},
            )
            self._open[request.request_id] = opened, request
            self._scheduler.add(request)

    def _end_turn(self, output: RequestOutput) -> bool:
        """Returns whether its job has ended as well."""
        now = self._clock.now()
        opened, request = self._open.pop(output.request_id)
        timeline = request.timeline
        assert timeline.first_token_at is not None
        self._outcome.waits_s.append(timeline.first_token_at - timeline.queued_at)
        if opened.num_turns == len(opened.job.turns):
            self._outcome.completions_s.append(now - opened.began_at)
            return True
        opened.token_ids = request.token_ids
        turn = opened.job.turns[opened.num_turns - 1]
        self._scheduler.note(request.request_id, FinishHint(turn.tool), now)
        self._schedule_turn(opened, now + turn.gap_s)
        return False
