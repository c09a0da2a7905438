"""Scheduler, cache and runner around a model that pools, without loop and wire."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention, SlidingWindow
from engine_svc.cache.config import CacheConfig
from engine_svc.core.pooling_spec import PoolingOptions
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.features.pooling.extras import PooledResult, PoolingRequest
from engine_svc.features.pooling.runner import PoolingRows
from engine_svc.model.loading.loader import LoadOptions, load_model
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from engine_svc.scheduler.config import SchedulerConfig

_BLOCK_SIZE = 4
_MAX_STEPS = 500


class PoolingRig:
    """Runs prompts, by id, and returns their results."""

    def __init__(
        self,
        folder: Path,
        *,
        pooling: PoolingOptions | None = None,
        model_impl: str = "auto",
        max_num_batched_tokens: int = 256,
        num_blocks: int = 200,
    ) -> None:
        options = LoadOptions(model_impl=model_impl, dtype="float32", num_threads=1, pooling=pooling)
        loaded = load_model(folder, options)
        self.facts = loaded.facts
        windows = [group.window for group in self.facts.groups]
        kinds = [
            FullAttention(_BLOCK_SIZE) if window is None else SlidingWindow(_BLOCK_SIZE, window)
            for window in windows
        ]
        config = SchedulerConfig(
            max_model_len=self.facts.max_position,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=bool(kinds),
        )
        self.scheduler = build_core(config, CacheConfig(num_blocks, tuple(kinds))).scheduler
        self.runner = ModelRunner(
            loaded.model,
            self.facts,
            KVTensors(self.facts, KVSizing(num_blocks, _BLOCK_SIZE, 0)),
            RunnerConfig(64, self.facts.max_position, _BLOCK_SIZE),
            loaded.ops,
            make_features=lambda context: [PoolingRows()],
        )
        self.outputs: dict[str, list[int]] = {}
        self.failed: dict[int, str] = {}

    def add(self, name: str, token_ids: list[int], wanted: PoolingRequest | None) -> None:
        """wanted: None for a request that samples two tokens."""
        extras = {} if wanted is None else {PoolingRequest: wanted}
        sampling = SamplingParams(2, temperature=0.0, skip_reading_prefix_cache=wanted is not None)
        request = Request(
            name, list(token_ids), len(token_ids), sampling, samples=wanted is None, extras=extras
        )
        assert self.scheduler.refusal(request) is None
        self.scheduler.add(request)

    def run(self) -> dict[str, Tensor]:
        """Step until no request is left; the results."""
        results: dict[str, Tensor] = {}
        for _ in range(_MAX_STEPS):
            if not self.scheduler.has_work:
                return results
            plan = self.scheduler.schedule(0.0)
            result = self.runner.execute(plan).result()
            self.failed |= result.failed
            for output in self.scheduler.update(plan, result, 0.0):
                self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.extras:
                    results[output.request_id] = to_tensor(output.extras[PooledResult])
        raise TimeoutError("the requests do not come to their end")

    def results(
        self, prompts: Mapping[str, list[int]], task: str, num_dimensions: int | None = None
    ) -> dict[str, Tensor]:
        for name, token_ids in prompts.items():
            self.add(name, token_ids, PoolingRequest(task, num_dimensions))
        return self.run()


def to_tensor(result: PooledResult) -> Tensor:
    return torch.frombuffer(bytearray(result.content), dtype=torch.float32).reshape(result.shape)
