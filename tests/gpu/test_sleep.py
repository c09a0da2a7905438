"""What sleeping gives back on the GPU, and that a model that wakes says what it said before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_svc.core.control import WakeTag
from engine_svc.core.step import StepPlan
from engine_svc.model.decoder import Model
from engine_svc.model.facts import ModelFacts
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.runner.cuda_graphs import CudaRecorder, DecodeGraphs, decode_sizes
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, RunnerConfig
from engine_svc.runner.sleep import WeightSource
from tests.engine_svc.model.checkpoints import MAX_POSITION, make_checkpoint
from tests.engine_svc.runner.fakes import PlanDriver
from tests.gpu.rig import BLOCK_SIZE, MAX_NUM_SEQS, NUM_BLOCKS, load_on

pytestmark = pytest.mark.gpu


def make_runner(folder: Path, device: torch.device, model_impl: str) -> tuple[ModelRunner, int]:
    """A runner that can load its weights again, and the bytes of its KV cache."""
    loaded = load_on(device, folder, model_impl, True)
    facts, ops = loaded.facts, loaded.ops
    kv = KVTensors(facts, KVSizing(NUM_BLOCKS, BLOCK_SIZE, 0), device)

    def load(again: Checkpoint) -> tuple[Model, ModelFacts]:
        one = load_on(device, again.folder, model_impl, True)
        return one.model, one.facts

    def record(model: Model) -> DecodeGraphs | None:
        if model_impl != "native":
            return None
        with torch.inference_mode():
            return DecodeGraphs(
                model,
                kv.layers,
                sizes=decode_sizes(MAX_NUM_SEQS),
                num_groups=len(facts.groups),
                vocab_size=facts.vocab_size,
                max_model_len=MAX_POSITION,
                block_size=BLOCK_SIZE,
                device=device,
                record=CudaRecorder(),
            )

    runner = ModelRunner(
        loaded.model,
        facts,
        kv,
        RunnerConfig(MAX_NUM_SEQS, MAX_POSITION, BLOCK_SIZE),
        ops,
        graphs=record(loaded.model),
        source=WeightSource(Checkpoint(folder), load, record),
    )
    return runner, sum(stack.nbytes for stack in kv.stacks)


def tokens(runner: ModelRunner) -> list[int]:
    """What a prompt is continued with, from an empty cache on."""
    driver = PlanDriver(runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    request = driver.add("r", [3 + 7 * index % 150 for index in range(30)])
    driver.step({"r": 30})
    for _ in range(6):
        driver.step({"r": 1})
    driver.finish("r")
    driver.add("bye", [1, 2])
    # The next plan takes the row away.
    driver.step({"bye": 2})
    driver.finish("bye")
    runner.execute(StepPlan(driver.num_steps, released=["bye"]))
    return request.output_token_ids


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("level", [1, 2])
def test_sleeping_frees_weights_and_kv_and_waking_brings_back_the_same_tokens(
    device, tmp_path, model_impl, level
):
    make_checkpoint("llama", tmp_path)
    weight_bytes = (tmp_path / "model.safetensors").stat().st_size
    runner, kv_bytes = make_runner(tmp_path, device, model_impl)
    before = tokens(runner)
    torch.cuda.synchronize()
    awake = torch.cuda.memory_allocated()
    runner.sleep(level)
    asleep = torch.cuda.memory_allocated()
    assert awake - asleep > kv_bytes + 0.9 * weight_bytes
    runner.wake({WakeTag.WEIGHTS})
    assert torch.cuda.memory_allocated() - asleep > 0.9 * weight_bytes
    runner.wake({WakeTag.KV_CACHE})
    assert tokens(runner) == before
