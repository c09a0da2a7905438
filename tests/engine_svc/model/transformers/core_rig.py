"""The real scheduler, cache and runner around a loaded model: everything but the wire."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import AttentionKind, FullAttention, SlidingWindow
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan
from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.model.loading.loader import LoadedModel
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors, max_blocks_per_request
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from engine_svc.runner.running_step import RunningStep
from engine_svc.scheduler.config import SchedulerConfig

BLOCK_SIZE = 4
STEPS_IN_FLIGHT = 2
_MAX_STEPS = 5000


class _RecordingModel:
    """Computes a step twice: as it is asked to, and for the logits of every token, which it keeps."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.logits = torch.empty(0)

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        every_row = torch.arange(token_ids.shape[0], device=token_ids.device)
        self.logits = self._model.forward(token_ids, positions, every_row, context)
        return self._model.forward(token_ids, positions, logit_rows, context)


@dataclass
class CoreRig:
    """Requests enter with `add`; `run` steps until they are done. Two steps are in flight.

    logits: by request id and place, of every token that was computed, each time that it was.
    """

    loaded: LoadedModel
    max_model_len: int
    max_num_batched_tokens: int
    room: float  # of the pool, in requests of full length
    logits: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    num_chunks: int = 0  # parts of prompts that did not reach the end
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        facts = self.loaded.facts
        needed = max_blocks_per_request(
            facts.groups,
            num_tokens=self.max_model_len,
            max_in_flight_tokens=self.max_num_batched_tokens * STEPS_IN_FLIGHT,
            block_size=BLOCK_SIZE,
        )
        num_blocks = int(needed * self.room) + 1
        scheduler = SchedulerConfig(
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=8,
            # Prompts enter a chunk at a time, so that the pool is taken by more of them than it can hold.
            reserve_full_prompt=False,
            async_scheduling=True,
            max_steps_in_flight=STEPS_IN_FLIGHT,
        )
        self.core = build_core(
            scheduler, CacheConfig(num_blocks, tuple(_kind(group.window) for group in facts.groups))
        )
        kv = KVTensors(facts, KVSizing(num_blocks, BLOCK_SIZE, bytes_per_block=0))
        # Memory is used as it comes, so the worst that it can hold must reach no result.
        for stack in kv.stacks:
            stack.fill_(float("nan"))
        self._model = _RecordingModel(self.loaded.model)
        self._runner = ModelRunner(
            self._model, facts, kv, RunnerConfig(8, self.max_model_len, BLOCK_SIZE), self.loaded.ops
        )
        self._in_flight: deque[tuple[StepPlan, RunningStep]] = deque()
        self._now = 0.0

    @property
    def num_hits(self) -> int:
        """Tokens of new requests that were found in the prefix cache."""
        return self.core.kv_cache.prefix_hits

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> Request:
        """Enter a greedy request that no token ends."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(request_id, list(prompt), len(prompt), sampling, arrival_at=self._now)
        self.requests[request_id] = request
        self.core.scheduler.add(request)
        return request

    def step(self) -> None:
        """Plan and run one step, and finish the oldest in flight, as the engine's loop does."""
        self._now += 1.0
        plan = self.core.scheduler.schedule(self._now)
        if plan.request_ids:
            self._in_flight.append((plan, self._runner.execute(plan)))
            self._note(plan)
        if len(self._in_flight) == STEPS_IN_FLIGHT or (self._in_flight and not plan.request_ids):
            oldest, running = self._in_flight.popleft()
            self.core.scheduler.update(oldest, running.result(), self._now)

    def run(self) -> None:
        """Step until nothing is left to do; more than so many steps are a failure."""
        for _ in range(_MAX_STEPS):
            if not self.core.scheduler.has_work and not self._in_flight:
                return
            self.step()
        raise AssertionError(f"requests are not done after {_MAX_STEPS} steps")

    def _note(self, plan: StepPlan) -> None:
        self.num_preemptions += len(plan.preempted)
        self.num_chunks += plan.samples.count(False)
        start = 0
        rows = zip(plan.request_ids, plan.num_tokens, plan.num_computed_tokens, strict=True)
        for request_id, num_tokens, num_computed in rows:
            for offset in range(num_tokens):
                place = (request_id, num_computed + offset)
                self.logits.setdefault(place, []).append(self._model.logits[start + offset])
            start += num_tokens


def _kind(window: int | None) -> AttentionKind:
    return FullAttention(BLOCK_SIZE) if window is None else SlidingWindow(BLOCK_SIZE, window)
