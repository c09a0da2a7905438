"""Tiny models, each made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from engine_svc.model.loading.loader import LoadedModel, LoadOptions, load_model
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from tests.engine_svc.model.checkpoints import MAX_POSITION, make_checkpoint
from tests.engine_svc.runner.fakes import PlanDriver

BLOCK_SIZE = 4
NUM_BLOCKS = 256


@dataclass
class TinyModel:
    """A model as we load it and as transformers made it."""

    theirs: PreTrainedModel
    ours: LoadedModel

    def runner(self, *, logits_processors: tuple = (), hooks: tuple = ()) -> ModelRunner:
        sizing = KVSizing(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, bytes_per_block=0)
        config = RunnerConfig(max_num_seqs=8, max_model_len=MAX_POSITION, block_size=BLOCK_SIZE)
        kv = KVTensors(self.ours.facts, sizing)
        # The memory is used as it comes, so the worst that it can hold must reach no result.
        for stack in kv.stacks:
            stack.fill_(float("nan"))
        return ModelRunner(
            self.ours.model,
            self.ours.facts,
            kv,
            config,
            self.ours.ops,
            logits_processors=logits_processors,
            hooks=hooks,
        )

    def driver(self, *, logits_processors: tuple = ()) -> PlanDriver:
        runner = self.runner(logits_processors=logits_processors)
        return PlanDriver(
            runner,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_groups=len(self.ours.facts.groups),
        )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    made: dict[str, TinyModel] = {}

    def get(family: str, model_impl: str = "auto") -> TinyModel:
        name = f"{family}-{model_impl}"
        if name not in made:
            folder: Path = tmp_path_factory.mktemp(name)
            theirs = make_checkpoint(family, folder)
            made[name] = TinyModel(
                theirs, load_model(folder, LoadOptions(num_threads=1, model_impl=model_impl))
            )
        return made[name]

    return get


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("llama", folder)
    return folder
