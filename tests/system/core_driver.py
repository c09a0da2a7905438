"""A real scheduler, cache and runner without a loop and a wire, step by step, every row's logits kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention, SlidingWindow
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan
from engine_svc.model.loading.loader import LoadedModel, LoadOptions, load_model
from engine_svc.runner.input_batch import InputBatch
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from engine_svc.runner.running_step import RunningStep
from engine_svc.scheduler.config import SchedulerConfig


class LogitRecorder:
    """Keeps the logits that each request's tokens are sampled from. A runner hook and a logits processor."""

    def __init__(self) -> None:
        self.logits: dict[str, list[Tensor]] = defaultdict(list)
        self._request_of: dict[int, str] = {}

    def before_forward(self, plan: StepPlan, batch: InputBatch) -> None:
        self._request_of = {batch.row_of[request_id]: request_id for request_id in plan.request_ids}

    def after_forward(self, plan: StepPlan, batch: InputBatch) -> None:
        pass

    def __call__(self, logits: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        for row, values in zip(rows.tolist(), logits, strict=True):
            self.logits[self._request_of[row]].append(values.clone())
        return logits


class CoreDriver:
    """Runs requests to their end, `depth` steps in flight."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 64,
        depth: int = 2,
    ) -> None:
        facts = loaded.facts
        kinds = [group.window for group in facts.groups]
        self.core = build_core(
            SchedulerConfig(
                max_model_len=facts.max_position,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                async_scheduling=depth > 1,
                max_steps_in_flight=depth,
            ),
            CacheConfig(
                num_blocks=num_blocks,
                groups=tuple(
                    FullAttention(block_size) if window is None else SlidingWindow(block_size, window)
                    for window in kinds
                ),
            ),
        )
        kv = KVTensors(facts, KVSizing(num_blocks, block_size, 0))
        for stack in kv.stacks:
            # The memory is used as it comes, so the worst that it can hold must reach no result.
            stack.fill_(float("nan"))
        self.recorder = LogitRecorder()
        self.runner = ModelRunner(
            loaded.model, facts, kv, RunnerConfig(max_num_seqs, facts.max_position, block_size), loaded.ops,
            hooks=(self.recorder,), logits_processors=(self.recorder,),
        )  # fmt: skip
        self.depth = depth
        self.num_chunks = 0
        self.num_cached_tokens = 0
        self._in_flight: list[tuple[StepPlan, RunningStep]] = []

    @property
    def num_preemptions(self) -> int:
        return self.core.scheduler.stats().num_preemptions

    def generate(
        self, prompts: Mapping[str, list[int]], num_tokens: int, **options: object
    ) -> dict[str, list[int]]:
        """Exactly `num_tokens` of output for each prompt, by request id."""
        sampling = SamplingParams(
            **{"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, **options}
        )
        for request_id, prompt in prompts.items():
            self.core.scheduler.add(Request(request_id, list(prompt), len(prompt), sampling))
        outputs: dict[str, list[int]] = {request_id: [] for request_id in prompts}
        num_steps = 0
        while self.core.scheduler.has_work or self._in_flight:
            self._step(outputs)
            num_steps += 1
            if num_steps > 100_000:
                raise TimeoutError("the requests do not come to their end")
        return outputs

    def _step(self, outputs: dict[str, list[int]]) -> None:
        plan = self.core.scheduler.schedule(0.0)
        if plan.request_ids:
            self.num_chunks += plan.samples.count(False)
            self._in_flight.append((plan, self.runner.execute(plan)))
        if len(self._in_flight) == self.depth or (self._in_flight and not plan.request_ids):
            oldest, running = self._in_flight.pop(0)
            for output in self.core.scheduler.update(oldest, running.result(), 0.0):
                outputs[output.request_id] += output.new_token_ids
                self.num_cached_tokens += output.num_cached_tokens or 0


def load(folder: Path, model_impl: str = "auto", dtype: str = "auto", cpu_isa: str = "auto") -> LoadedModel:
    options = LoadOptions(num_threads=1, model_impl=model_impl, dtype=dtype, cpu_isa=cpu_isa)
    return load_model(folder, options)
