"""What the compose file for GPU hosts starts is what runs here: flags and variables alike, another model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_svc.build.runner import RunnerSide, build_runner
from engine_svc.config import EngineConfig
from engine_svc.core.step import StepPlan
from tests.compose.files import GPU_FILE, flags_of, read
from tests.engine_svc.model.checkpoints import make_checkpoint
from tests.engine_svc.runner.fakes import PlanDriver
from tests.engine_svc.runner.test_model_runner import prompt_of
from triptych_kit.config import load_config

pytestmark = pytest.mark.gpu
NUM_TOKENS = 32
NUM_BLOCKS = 256


class _Side:
    """The side that runs plans, as what a driver drives."""

    def __init__(self, side: RunnerSide) -> None:
        self._side = side

    def execute(self, plan: StepPlan):
        return self._side.executor.launch(plan)


def test_the_engine_of_the_compose_file_produces_what_transformers_does(device, tmp_path: Path):
    theirs = make_checkpoint("llama", tmp_path)
    service = read(GPU_FILE)["services"]["engine-0"]
    model, *flags = flags_of(service)
    assert not model.startswith("-")
    config = load_config(
        EngineConfig, [str(tmp_path), *flags], service="engine", env=service["environment"]
    ).config
    assert config.device == "cuda"
    side = build_runner(config, lambda phase, done, total: None)
    assert side.num_kv_blocks > NUM_BLOCKS, "the cache takes what --gpu-memory-utilization gives it"
    driver = PlanDriver(_Side(side), num_blocks=NUM_BLOCKS, block_size=config.block_size)
    prompt = prompt_of(40, seed=1)
    request = driver.add("a", prompt)
    driver.step({"a": len(prompt)})
    for _ in range(NUM_TOKENS - 1):
        driver.step({"a": 1})
    with torch.inference_mode():
        ids = theirs.generate(  # type: ignore[operator]  # It is a method of a mixin.
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )
    assert request.token_ids[len(prompt) :] == ids[0, len(prompt) :].tolist()
    side.executor.shutdown()
