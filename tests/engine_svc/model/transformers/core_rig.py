"""The real scheduler, cache and runner around a loaded model, step by step: everything but loop and wire."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine_svc.build.engine import attention_kind, build_core
from engine_svc.cache.attention import KeptState
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.core.step import AdmittedRequest, StepPlan
from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.model.loading.loader import LoadedModel, LoadOptions, load_model
from engine_svc.runner.feature import LogitRows, RunnerFeature
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors, max_blocks_per_request
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from engine_svc.runner.running_step import RunningStep
from engine_svc.runner.sampling.transfer import Ints
from engine_svc.scheduler.config import SchedulerConfig
from tests.engine_svc.request_options import make_runner_features, split_options

BLOCK_SIZE = 4
STEPS_IN_FLIGHT = 2
_MAX_STEPS = 100_000


class LogitRecorder(RunnerFeature):
    """Keeps the logits that each request's tokens are sampled from."""

    def __init__(self) -> None:
        self.logits: dict[str, list[Tensor]] = defaultdict(list)
        self._request_of: dict[int, str] = {}

    def uses(self, admitted: AdmittedRequest) -> bool:
        return True

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        self._request_of[row] = admitted.request_id

    def apply(self, logits: Tensor, some: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        for row, values in zip(some.rows.tolist(), logits, strict=True):
            self.logits[self._request_of[row]].append(values.clone())


class CoreDriver:
    """Runs requests to their end, `depth` steps in flight."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        max_model_len: int = 0,  # 0: what the model takes
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 64,
        depth: int = 2,
        reserve_full_prompt: bool = True,
        model: Model | None = None,
    ) -> None:
        facts = loaded.facts
        max_model_len = max_model_len or facts.max_position
        kinds = [attention_kind(group, block_size) for group in facts.groups]
        num_slots = 0
        if facts.state_shapes:
            kinds.append(KeptState(block_size, 3 * block_size))
            num_slots = max_num_seqs + 5
        self.core = build_core(
            SchedulerConfig(
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                reserve_full_prompt=reserve_full_prompt,
                async_scheduling=depth > 1,
                max_steps_in_flight=depth,
            ),
            CacheConfig(num_blocks, tuple(kinds), num_state_slots=num_slots),
        )
        kv = KVTensors(facts, KVSizing(num_blocks, block_size, 0, num_slots))
        # Memory is used as it comes, so the worst that it can hold must reach no result.
        for stack in kv.stacks:
            stack.fill_(float("nan"))
        self.recorder = LogitRecorder()
        self.runner = ModelRunner(
            model or loaded.model,
            facts,
            kv,
            RunnerConfig(max_num_seqs, max_model_len, block_size),
            loaded.ops,
            make_features=lambda context: [*make_runner_features(context), self.recorder],
        )
        self.depth = depth
        self.requests: dict[str, Request] = {}
        self.num_chunks = 0  # parts of prompts that did not reach the end
        self.num_cached_tokens = 0
        self._in_flight: deque[tuple[StepPlan, RunningStep]] = deque()

    @property
    def num_preemptions(self) -> int:
        return self.core.scheduler.stats().num_preemptions

    def add(self, request_id: str, prompt: list[int], max_tokens: int, **all_options: object) -> Request:
        """Enter a request that no token ends; it is greedy unless its sampling differs."""
        sampling, extras = split_options(max_tokens=max_tokens, **{"ignore_eos": True, **all_options})
        request = Request(request_id, list(prompt), len(prompt), sampling, extras=extras)
        self.requests[request_id] = request
        self.core.scheduler.add(request)
        return request

    def run(self) -> None:
        """Step until nothing is left to do; more than so many steps are a failure."""
        for _ in range(_MAX_STEPS):
            if not self.core.scheduler.has_work and not self._in_flight:
                return
            self.step()
        raise TimeoutError("the requests do not come to their end")

    def generate(
        self, prompts: Mapping[str, list[int]], num_tokens: int, **all_options: object
    ) -> dict[str, list[int]]:
        """Exactly `num_tokens` of output for each prompt, by request id."""
        for request_id, prompt in prompts.items():
            self.add(request_id, prompt, num_tokens, **all_options)
        self.run()
        return {request_id: self.requests[request_id].output_token_ids for request_id in prompts}

    def step(self) -> None:
        """Plan and run one step, and finish the oldest in flight, as the engine's loop does."""
        plan = self.core.scheduler.schedule(0.0)
        if plan.request_ids:
            self.num_chunks += plan.samples.count(False)
            self._in_flight.append((plan, self.runner.execute(plan)))
            self.note(plan)
        if len(self._in_flight) == self.depth or (self._in_flight and not plan.request_ids):
            oldest, running = self._in_flight.popleft()
            for output in self.core.scheduler.update(oldest, running.result(), 0.0):
                self.num_cached_tokens += output.num_cached_tokens or 0

    def note(self, plan: StepPlan) -> None:
        """A step was launched."""


class _RecordingModel:
    """Keeps the logits of every token: where a step asks for fewer, it is computed twice."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.logits = torch.empty(0)

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        every_row = torch.arange(token_ids.shape[0], device=token_ids.device)
        if torch.equal(logit_rows, every_row):
            self.logits = self._model.forward(token_ids, positions, logit_rows, context)
            return self.logits
        states = [tensor for tensors in context.state_layers for tensor in tensors]
        before = [tensor.clone() for tensor in states]
        self.logits = self._model.forward(token_ids, positions, every_row, context)
        # KV is only written once more, states are advanced.
        for tensor, old in zip(states, before, strict=True):
            tensor.copy_(old)
        return self._model.forward(token_ids, positions, logit_rows, context)


class CoreRig(CoreDriver):
    """Keeps the logits of every token that was computed, by request id and place, each time that it was.

    The pool has `room` for so many requests of full length, and prompts enter a chunk at a time, so that it
    is taken by more of them than it can hold.
    """

    def __init__(
        self, loaded: LoadedModel, *, max_model_len: int, max_num_batched_tokens: int, room: float
    ) -> None:
        needed = max_blocks_per_request(
            loaded.facts.groups,
            num_tokens=max_model_len,
            max_in_flight_tokens=max_num_batched_tokens * STEPS_IN_FLIGHT,
            block_size=BLOCK_SIZE,
        )
        self._model = _RecordingModel(loaded.model)
        self.logits: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        super().__init__(
            loaded,
            num_blocks=max(1, int(needed * room)) + 1,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=8,
            depth=STEPS_IN_FLIGHT,
            reserve_full_prompt=False,
            model=self._model,
        )

    @property
    def num_hits(self) -> int:
        """Tokens of new requests that were found in the prefix cache."""
        return self.core.kv_cache.prefix_hits

    def note(self, plan: StepPlan) -> None:
        start = 0
        rows = zip(plan.request_ids, plan.num_tokens, plan.num_computed_tokens, strict=True)
        for request_id, num_tokens, num_computed in rows:
            for offset in range(num_tokens):
                self.logits[request_id, num_computed + offset].append(self._model.logits[start + offset])
            start += num_tokens


def load(folder: Path, model_impl: str = "auto", dtype: str = "auto", cpu_isa: str = "auto") -> LoadedModel:
    all_options = LoadOptions(num_threads=1, model_impl=model_impl, dtype=dtype, cpu_isa=cpu_isa)
    return load_model(folder, all_options)
