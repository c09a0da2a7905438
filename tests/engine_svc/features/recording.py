"""A recorded scheduler without a model, and random traffic for it."""

from __future__ import annotations

import random
from collections import Counter, deque
from pathlib import Path
from typing import Any

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import FinishReason, Request, RequestOutput
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.record import RecordedScheduler
from engine_svc.features.recorded_case import case_config, create_case
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from tests.conformance.replay import read_case

EOS = 2
SCHEDULER = SchedulerConfig(max_model_len=64, max_num_batched_tokens=24, max_num_seqs=6)
CACHE = CacheConfig(num_blocks=26, groups=(FullAttention(4),))


def request(request_id: str, num_tokens: int = 6, *, max_tokens: int = 16) -> Request:
    """A request whose prompt begins like that of all others."""
    return Request(request_id, list(range(10, 10 + num_tokens)), num_tokens, SamplingParams(max_tokens))


class Recording:
    """A recorded scheduler, and what a test needs around it."""

    def __init__(
        self,
        folder: Path,
        scheduler: SchedulerConfig = SCHEDULER,
        cache: CacheConfig = CACHE,
        policy: str = "fcfs",
        max_steps: int = 100_000,
        max_characters: int = 1 << 30,
    ) -> None:
        self.path = folder / "case.json.gz"
        self.core = build_core(scheduler, cache, policy=policy)
        case = create_case(self.path, case_config(scheduler, cache, policy), version="9")
        self.scheduler = RecordedScheduler(
            self.core.scheduler, self.core.kv_cache, case, max_steps=max_steps, max_characters=max_characters
        )

    def step(self) -> StepPlan:
        """Plan a step and give it back, a token for each row that samples."""
        plan = self.scheduler.schedule(0.0)
        self.give_back(plan)
        return plan

    def give_back(self, plan: StepPlan, *, non_finite: tuple[int, ...] = ()) -> None:
        """Give back a plan, a token for each row that samples."""
        sampled = [[7] if samples else [] for samples in plan.samples]
        self.scheduler.update(plan, StepResult(plan.step_number, sampled, {}, list(non_finite)), 0.0)

    def end(self) -> dict[str, Any]:
        self.scheduler.close()
        return read_case(self.path)


class Traffic:
    """Random commands and tokens for a recorded scheduler, in the order of an engine's loop."""

    def __init__(self, recording: Recording, config: SchedulerConfig, seed: int) -> None:
        self._scheduler = recording.scheduler
        self._config = config
        self._rng = random.Random(seed)
        self._head = [self._rng.randrange(3, 9) for _ in range(12)]
        self._alive: list[str] = []
        self._num_added = 0
        self._in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.reasons: Counter[FinishReason] = Counter()

    def run(self, num_steps: int) -> None:
        """So many steps, with commands before and during each."""
        for _ in range(num_steps):
            self._command()
            plan = self._scheduler.schedule(0.0)
            if plan.request_ids:
                self._in_flight.append((plan, self._result(plan)))
            if len(self._in_flight) == self._config.max_steps_in_flight or not plan.request_ids:
                self._command()
                self._finish_oldest()

    def _finish_oldest(self) -> None:
        if self._in_flight:
            self._note_ends(self._scheduler.update(*self._in_flight.popleft(), 0.0))

    def _command(self) -> None:
        rng = self._rng
        for _ in range(rng.choice((0, 0, 1, 2))):
            if len(self._alive) < 14:
                self._add()
        if self._alive and rng.random() < 0.08:
            ended = rng.sample(self._alive, min(len(self._alive), rng.randrange(1, 3)))
            self._note_ends(self._scheduler.abort([*ended, "unknown"], 0.0))
        if rng.random() < 0.05:
            self._scheduler.set_pause(rng.choice([PauseState.NONE, *PauseState]))

    def _add(self) -> None:
        rng = self._rng
        own = [rng.randrange(3, 9) for _ in range(rng.randrange(1, 30))]
        prompt = self._head[: rng.choice((0, 8, 12))] + own
        request = Request(
            f"r{self._num_added}",
            prompt,
            len(prompt),
            SamplingParams(
                max_tokens=rng.randrange(1, 20),
                temperature=rng.random(),
                ignore_eos=rng.random() < 0.3,
                eos_token_id=rng.choice((EOS, None)),
                stop_token_ids=frozenset(rng.sample(range(3, 40), rng.randrange(3))),
                skip_reading_prefix_cache=rng.random() < 0.1,
            ),
            priority=rng.randrange(3),
            arrival_at=rng.random() * 10,
            cache_salt=rng.choice(("", "", "", "salt")),
        )
        self._num_added += 1
        self._alive.append(request.request_id)
        self._scheduler.add(request)

    def _result(self, plan: StepPlan) -> StepResult:
        rng = self._rng
        sampled: list[list[int]] = []
        drafts: dict[str, list[int]] = {}
        for request_id, samples, proposed in zip(
            plan.request_ids, plan.samples, plan.draft_token_ids, strict=True
        ):
            # Drafts without a value that pad a row are never right, those of a step in flight may be.
            known = proposed if self._config.async_scheduling or -1 not in proposed else []
            accepted = [rng.randrange(3, 40) if token < 0 else token for token in known]
            num_accepted = rng.randrange(len(accepted) + 1)
            sampled.append([*accepted[:num_accepted], rng.randrange(EOS, 40)] if samples else [])
            if self._config.num_speculative_tokens and not self._config.async_scheduling:
                drafts[request_id] = [rng.randrange(3, 40) for _ in range(rng.randrange(3))]
        return StepResult(plan.step_number, sampled, drafts)

    def _note_ends(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self.reasons[output.finish_reason] += 1
                self._alive.remove(output.request_id)
