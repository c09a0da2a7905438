"""Requests that decode in a real scheduler whose steps have a token at once: no model, no engine loop."""

from __future__ import annotations

import gc
import resource
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from engine_svc.build.engine import Core, build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.process.run import calm_collector
from engine_svc.scheduler.config import SchedulerConfig

T = TypeVar("T")

SAMPLED_TOKEN = 7
EOS = 2
_VOCABULARY_SIZE = 16_000


class WrongLoad(Exception):
    """A measured step did not hold what it was to hold."""


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The requests, and the size of the scheduler. The peer gets the same."""

    num_running: int
    overlapped: bool  # a step is planned while the one before it is in flight
    num_prompt_tokens: int = 64
    prompt_spread: int = 1  # prompts have 0 to so many tokens, less one, more, in turn
    max_tokens: int = 1_500
    block_size: int = 16
    max_model_len: int = 2_048
    max_num_batched_tokens: int = 8_192
    max_num_seqs: int = 1_024
    num_blocks: int = 131_080  # room for all to the end: none is preempted

    @property
    def max_prompt_tokens(self) -> int:
        return self.num_prompt_tokens + self.prompt_spread - 1


@dataclass(slots=True)
class Timings:
    schedule_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)
    num_interrupted: int = 0  # verbs during which the kernel gave the core to another process

    def extend(self, further: Timings) -> None:
        self.schedule_s += further.schedule_s
        self.update_s += further.update_s
        self.num_rows += further.num_rows
        self.num_interrupted += further.num_interrupted

    def time(self, call: Callable[..., T], *arguments: object) -> tuple[T, float]:
        """What a call returns, and its seconds: of the processor, where the core was taken away meanwhile."""
        num_switches, processor_time = _num_switches(), time.thread_time()
        began = time.perf_counter()
        returned = call(*arguments)
        elapsed = time.perf_counter() - began
        processor_time = time.thread_time() - processor_time
        if _num_switches() == num_switches:
            return returned, elapsed
        self.num_interrupted += 1
        return returned, processor_time

    @property
    def total_s(self) -> list[float]:
        return [sum(pair) for pair in zip(self.schedule_s, self.update_s, strict=True)]


class SchedulerLoad:
    """A scheduler with requests, stepped by hand. Timed are `schedule` and `update`, nothing around them."""

    def __init__(self, shape: LoadShape) -> None:
        self.core = _build(shape)
        self._max_in_flight = 2 if shape.overlapped else 1
        self._plans: deque[StepPlan] = deque()
        # As the engine does once it is built.
        calm_collector()
        for index in range(shape.num_running):
            self.core.scheduler.add(make_request(index, shape))

    @property
    def num_steps_in_flight(self) -> int:
        """Steps that were planned and not given back."""
        return len(self._plans)

    def measure(self, num_lead_in: int, num_steps: int) -> Timings:
        """Steps that are not counted, to have the caches warm again, then steps that are."""
        for _ in range(num_lead_in):
            self.step(Timings())
        timings = Timings()
        for _ in range(num_steps):
            self.step(timings)
        return timings

    def step(self, timings: Timings) -> None:
        """Plan a step, and give back the oldest one when as many as may be are in flight."""
        plan, schedule_s = timings.time(self.core.scheduler.schedule, 0.0)
        self._plans.append(plan)
        timings.schedule_s.append(schedule_s)
        timings.num_rows.append(len(plan.request_ids))
        update_s = 0.0
        if len(self._plans) == self._max_in_flight:
            oldest = self._plans.popleft()
            _, update_s = timings.time(self.core.scheduler.update, oldest, _result_of(oldest), 0.0)
        timings.update_s.append(update_s)

    def close(self) -> None:
        gc.unfreeze()


def _num_switches() -> int:
    """How often the kernel has given the core of this thread to another."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _result_of(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_number, [[SAMPLED_TOKEN] if samples else [] for samples in plan.samples])


def make_request(index: int, shape: LoadShape) -> Request:
    """The request of this index, with a prompt that shares no block with another's."""
    num_tokens = shape.num_prompt_tokens + index % shape.prompt_spread
    return Request(f"cmpl-{index:032x}", make_prompt(index, num_tokens), num_tokens, _sampling(shape))


def make_prompt(index: int, num_tokens: int) -> list[int]:
    """Tokens that differ from those of every other index from the first on."""
    return [(index * 131 + offset * 7) % _VOCABULARY_SIZE for offset in range(num_tokens)]


def _sampling(shape: LoadShape) -> SamplingParams:
    return SamplingParams(max_tokens=shape.max_tokens, temperature=0.0, ignore_eos=True, eos_token_id=EOS)


def _build(shape: LoadShape) -> Core:
    scheduler = SchedulerConfig(
        max_model_len=shape.max_model_len,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        max_num_seqs=shape.max_num_seqs,
        async_scheduling=shape.overlapped,
        max_steps_in_flight=2 if shape.overlapped else 1,
    )
    cache = CacheConfig(num_blocks=shape.num_blocks, groups=(FullAttention(shape.block_size),))
    return build_core(scheduler, cache)
