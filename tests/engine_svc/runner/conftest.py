"""Tiny models, each made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from engine_svc.model.decoder import Model
from engine_svc.model.loading.loader import LoadedModel, LoadOptions, load_model
from engine_svc.runner.feature import RunnerFeature
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, OnFailed, RunnerConfig
from engine_svc.runner.preparer import OnPrepared
from engine_svc.runner.step_drafts import NoDrafting
from engine_svc.speculation.drafting import Drafting
from engine_svc.speculation.proposer import Proposer
from tests.engine_svc.model.checkpoints import MAX_POSITION, make_checkpoint
from tests.engine_svc.request_options import make_runner_features
from tests.engine_svc.runner.fakes import PlanDriver

BLOCK_SIZE = 4
NUM_BLOCKS = 256


@dataclass
class TinyModel:
    """A model as we load it and as transformers made it."""

    theirs: PreTrainedModel
    ours: LoadedModel

    def runner(
        self,
        *,
        features: Sequence[RunnerFeature] = (),
        takes_embeds: bool = False,
        model: Model | None = None,
        proposer: Proposer | None = None,
        max_steps_in_flight: int = 2,
        on_failed: OnFailed | None = None,
        on_prepared: OnPrepared = lambda number, failure: None,
    ) -> ModelRunner:
        """A runner with all features of an engine, then `features`; of `model` if it is not the own one."""
        sizing = KVSizing(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, bytes_per_block=0)
        config = RunnerConfig(max_num_seqs=8, max_model_len=MAX_POSITION, block_size=BLOCK_SIZE)
        kv = KVTensors(self.ours.facts, sizing)
        # The memory is used as it comes, so the worst that it can hold must reach no result.
        for stack in kv.stacks:
            stack.fill_(float("nan"))
        return ModelRunner(
            model or self.ours.model,
            self.ours.facts,
            kv,
            config,
            self.ours.ops,
            make_features=lambda context: [
                *make_runner_features(context, takes_embeds=takes_embeds),
                *features,
            ],
            make_drafting=(
                NoDrafting if proposer is None else partial(Drafting, proposer, max_steps_in_flight)
            ),
            on_failed=on_failed,
            on_prepared=on_prepared,
        )

    def driver(
        self,
        *,
        features: Sequence[RunnerFeature] = (),
        takes_embeds: bool = False,
        on_failed: OnFailed | None = None,
    ) -> PlanDriver:
        return PlanDriver(
            self.runner(features=features, takes_embeds=takes_embeds, on_failed=on_failed),
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
