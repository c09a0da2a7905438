"""Several engines in one process that share a model's experts, each in a thread of its own when it steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from engine_svc.core.step import StepResult
from engine_svc.data_parallel.expert_shards import HeldExperts
from engine_svc.data_parallel.group import Meeting
from engine_svc.data_parallel.torch_group import ProcessRankGroup, ProcessRankGroups
from engine_svc.data_parallel.wave import Vote
from engine_svc.model.context import ForwardContext
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.model.loading.loader import LoadedModel, LoadOptions, load_model
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from engine_svc.runner.sleep import WeightSource
from tests.engine_svc.model.checkpoints import MAX_POSITION
from tests.engine_svc.runner.fakes import PlanDriver
from triptych_kernels import AttentionBatch

HOST = "127.0.0.1"
BLOCK_SIZE = 4
NUM_BLOCKS = 128
# Longer than anything takes here: a test that runs into it has failed.
TIMEOUT_S = 20.0
_CPU = torch.device("cpu")

Result = TypeVar("Result")


def in_threads(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of calls that wait for each other; the first error is raised when all have ended."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
    return [future.result() for future in futures]


def outcomes(calls: Sequence[Callable[[], Result]]) -> list[Result | BaseException]:
    """As `in_threads`, with errors in the place of results."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
    return [future.exception() or future.result() for future in futures]


@dataclass
class SharingEngine:
    """The tensor side of one engine, and what makes its plans."""

    folder: Path
    rank: int
    size: int
    dtype: str = "auto"
    timeout_s: float = TIMEOUT_S
    group: ProcessRankGroup | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.experts = HeldExperts(self.rank, self.size)
        self.groups = ProcessRankGroups(
            self.experts.exchange, host=HOST, device=_CPU, timeout_s=self.timeout_s
        )
        self.loaded = self.load(Checkpoint(self.folder))
        kv = KVTensors(self.loaded.facts, KVSizing(NUM_BLOCKS, BLOCK_SIZE, bytes_per_block=0))
        for stack in kv.stacks:
            stack.fill_(float("nan"))
        self.runner = ModelRunner(
            self.loaded.model,
            self.loaded.facts,
            kv,
            RunnerConfig(max_num_seqs=8, max_model_len=MAX_POSITION, block_size=BLOCK_SIZE),
            self.loaded.ops,
            source=WeightSource(Checkpoint(self.folder), self._load_again, lambda model: None),
            exchange=self.experts.exchange,
        )
        self.driver = PlanDriver(self.runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)

    @property
    def model(self) -> NativeDecoder:
        assert isinstance(self.loaded.model, NativeDecoder)
        return self.loaded.model

    def load(self, checkpoint: Checkpoint) -> LoadedModel:
        options = LoadOptions(num_threads=1, device="cpu", dtype=self.dtype)
        loaded = load_model(checkpoint, options, share=self.experts.share)
        self.experts.attach(loaded, checkpoint)
        return loaded

    def _load_again(self, checkpoint: Checkpoint):
        # Not kept: what sleeps gives its weights up.
        again = self.load(checkpoint)
        return again.model, again.facts

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        self.groups.close()


class Sharing:
    """Engines and the groups that they form."""

    def __init__(self, folder: Path, size: int, **options: object) -> None:
        self.engines = [SharingEngine(folder, rank, size, **options) for rank in range(size)]
        self.generation = 0
        self.members: list[SharingEngine] = []

    def form(self, members: Sequence[SharingEngine] | None = None) -> None:
        """Load what the members are to hold, and have them meet."""
        self.generation += 1
        self.members = list(self.engines if members is None else members)
        first, size = self.members[0], len(self.members)
        for rank, engine in enumerate(self.members):
            engine.experts.prepare(rank, size)
            engine.experts.adopt()
        meetings = [
            Meeting(self.generation, rank, size, HOST, first.groups.store_port) for rank in range(size)
        ]
        groups = in_threads(
            [
                partial(engine.groups.form, meeting)
                for engine, meeting in zip(self.members, meetings, strict=True)
            ]
        )
        for engine, group in zip(self.members, groups, strict=True):
            engine.group = group

    def leave(self) -> None:
        for engine in self.members:
            if engine.group is not None:
                engine.group.close()

    def step(self, grants: Sequence[dict[str, int]]) -> list[StepResult]:
        """One step, in which each member computes what it is granted, or only takes part."""
        return in_threads(
            [partial(engine.driver.step, grant) for engine, grant in zip(self.members, grants, strict=True)]
        )

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def vote(wave: int = 1, *, has_work: bool = False, is_pausing: bool = False, generation: int = 0) -> Vote:
    return Vote(wave, has_work, is_pausing, generation)


@torch.inference_mode()
def logits_of(engine: SharingEngine, token_ids: torch.Tensor) -> torch.Tensor:
    """[T, V] of a row of its own, computed in one step with whatever the others compute in it."""
    if not len(token_ids):
        engine.model.take_part()
        return torch.empty(0)
    num_tokens = len(token_ids)
    kv = KVTensors(engine.loaded.facts, KVSizing(NUM_BLOCKS, BLOCK_SIZE, bytes_per_block=0))
    positions = torch.arange(num_tokens)
    table = torch.arange(-(-num_tokens // BLOCK_SIZE))
    batch = AttentionBatch.of(table[None].int(), [num_tokens], [num_tokens], BLOCK_SIZE)
    context = ForwardContext(kv.layers, [positions], [batch])
    return engine.model.forward(token_ids, positions, positions, context)
