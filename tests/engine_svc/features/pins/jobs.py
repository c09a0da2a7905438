"""A scheduler that serves jobs, with pins and a step a second, and turns for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.config import EngineConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan
from engine_svc.features.pins import scheduler
from engine_svc.features.pins.estimator import FixedTtl, TtlRule
from engine_svc.features.pins.extras import FinishHint, JobTurn
from engine_svc.features.pins.options import POLICY
from engine_svc.features.pins.scheduler import JobPins
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.feature import SchedulerContext
from tests.engine_svc.scheduler.fakes import Stage
from triptych_kit.clock import FakeClock
from triptych_kit.telemetry.metrics import Metrics


class Jobs:
    """17 blocks of 16 tokens, if not said otherwise. The clock of the pins is that of the steps."""

    def __init__(
        self,
        rule: TtlRule | None = None,
        *,
        gives_pins_first: bool = False,
        num_blocks: int = 18,
        max_num_seqs: int = 8,
        seconds_per_step: float = 0.0,
        seconds_per_token: float = 0.0,
        pins: JobPins | None = None,
    ) -> None:
        """pins: those to use, whose clock is another; None: such of the rule."""
        self.metrics = Metrics("engine")
        self.pins = pins or JobPins(
            rule or FixedTtl(10.0), self, self.metrics, gives_pins_first=gives_pins_first
        )
        self.stage = Stage(
            policy=POLICY, features=[self.pins], num_blocks=num_blocks, max_num_seqs=max_num_seqs
        )
        self.scheduler, self.cache = self.stage.scheduler, self.stage.cache
        self._seconds_per_step, self._seconds_per_token = seconds_per_step, seconds_per_token
        self._num_turns = 0

    def now(self) -> float:
        return self.stage.now

    def add(
        self,
        job: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int = 4,
        is_last: bool = False,
        tool: str = "tool",
        has_siblings: bool = False,
        blockers: Sequence[str] = (),
    ) -> Request:
        """A turn arrives; a prompt shares its beginning with those that have the same tokens."""
        self._num_turns += 1
        request = Request(
            f"{job}{self._num_turns}",
            list(token_ids),
            len(token_ids),
            SamplingParams(max_tokens=max_tokens),
            job=job,
            arrival_at=self.stage.now,
            blockers=set(blockers),
        )
        if job:
            request.extras[JobTurn] = JobTurn(is_last, tool, has_siblings)
        self.scheduler.add(request)
        return request

    def run(self, job: str, token_ids: Sequence[int], **options: object) -> Request:
        """A turn from its arrival to its end; nothing else may be running."""
        request = self.add(job, token_ids, **options)  # type: ignore[arg-type]
        while not request.is_finished:
            self.step()
        return request

    def step(self) -> StepPlan:
        """A step takes a second until it is planned, and then its own time and that of each token."""
        plan = self.stage.schedule()
        self.stage.now += self._seconds_per_step + plan.total_num_tokens * self._seconds_per_token
        self.stage.update(plan)
        return plan

    def hint(self, request: Request, tool: str | None) -> None:
        """What the frontend says of a turn that has ended."""
        self.scheduler.note(request.request_id, FinishHint(tool), self.stage.now)

    def wait(self, seconds: float) -> None:
        """Time passes in an idle engine."""
        self.stage.now += seconds
        self.scheduler.on_idle(self.stage.now)

    @property
    def pinned(self) -> list[str]:
        return list(self.cache.retained)

    @property
    def outcomes(self) -> dict[str, float]:
        """How pins have ended, those outcomes that were."""
        reading = self.metrics.families["triptych_engine_pins_total"].read()
        assert isinstance(reading, Mapping)
        return {outcome: num for (outcome,), num in reading.items() if isinstance(num, float | int) and num}


def made_for(policy: str, **options: Any) -> JobPins | None:
    """The pins of an engine with these options."""
    context = SchedulerContext(
        FakeClock(),
        lambda work: work(),
        SchedulerConfig(max_model_len=64),
        CacheConfig(10, (FullAttention(16),)),
        Metrics("engine"),
    )
    config = EngineConfig(model="model", scheduling_policy=policy, **options)
    made = scheduler.make(config, context)
    assert made is None or isinstance(made, JobPins)
    return made


def prompt(num_tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + num_tokens))
