"""A scheduler over a runner that sleeps, wakes and takes other weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.model.decoder import Model
from engine_svc.model.facts import ModelFacts
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.model.loading.loader import LoadOptions, load_model
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from engine_svc.runner.sleep import WeightSource
from engine_svc.scheduler.config import SchedulerConfig
from tests.engine_svc.model.checkpoints import MAX_POSITION, VOCAB_SIZE

BLOCK_SIZE = 4
NUM_BLOCKS = 128
LOAD_OPTIONS = LoadOptions(num_threads=1, device="cpu")


@dataclass
class Rig:
    """A scheduler over a runner, and the folder that its weights come from."""

    folder: Path
    loads: list[Path] = field(default_factory=list)
    is_full: bool = False  # whether weights find no memory

    def __post_init__(self) -> None:
        model, facts = self.load(Checkpoint(self.folder))
        self.loads.clear()
        self.kv = KVTensors(facts, KVSizing(NUM_BLOCKS, BLOCK_SIZE, bytes_per_block=0))
        sizes = RunnerConfig(max_num_seqs=8, max_model_len=MAX_POSITION, block_size=BLOCK_SIZE)
        source = WeightSource(Checkpoint(self.folder), self.load, lambda model: None)
        ops = load_model(self.folder, LOAD_OPTIONS).ops
        self.runner = ModelRunner(model, facts, self.kv, sizes, ops, source=source)
        self.core = build_core(
            SchedulerConfig(max_model_len=MAX_POSITION, max_num_seqs=8),
            CacheConfig(NUM_BLOCKS, (FullAttention(BLOCK_SIZE),)),
        )

    def load(self, checkpoint: Checkpoint) -> tuple[Model, ModelFacts]:
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.loads.append(checkpoint.folder)
        loaded = load_model(checkpoint, LOAD_OPTIONS)
        return loaded.model, loaded.facts

    @property
    def kv_bytes(self) -> int:
        return sum(stack.untyped_storage().nbytes() for stack in self.kv.stacks)

    def add(self, request_id: str, max_tokens: int = 12) -> Request:
        prompt = [3 + (7 * index) % (VOCAB_SIZE - 3) for index in range(30)]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(request_id, prompt, len(prompt), sampling)
        self.core.scheduler.add(request)
        return request

    def step(self) -> None:
        scheduler = self.core.scheduler
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, self.runner.execute(plan).result(), 0.0)

    def generate(self, request_id: str) -> list[int]:
        request = self.add(request_id)
        while self.core.scheduler.has_work:
            self.step()
        return request.token_ids[30:]

    def forget(self) -> None:
        assert self.core.scheduler.reset_prefix_cache(0.0, reset_running=True)


def change(folder: Path, scale: float = -0.5) -> None:
    """Give the folder weights of the same form that answer otherwise."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
