"""A whole decoder on the table of Triton ops: token by token what transformers generates."""

from __future__ import annotations

import pytest

from engine_svc.model.loading.loader import LoadOptions, load_model
from tests.engine_svc.model.checkpoints import make_checkpoint
from tests.engine_svc.runner.test_model_runner import assert_same_stream, prompt_of
from tests.gpu.rig import GpuModel
from triptych_kernels.triton import triton_ops

NUM_TOKENS = 2


@pytest.mark.parametrize(
    ("family", "is_deterministic"),
    [("llama", True), ("mistral", False), ("qwen3_moe", False), ("qwen3_moe", True), ("gemma3", True)],
)
def test_mixed_and_chunked_steps_produce_what_transformers_generates(
    family, is_deterministic, device, tmp_path
):
    theirs = make_checkpoint(family, tmp_path)
    load_options = LoadOptions(dtype="float32", device=device.type, model_impl="native", num_threads=1)
    ours = load_model(tmp_path, load_options, ops=triton_ops(deterministic=is_deterministic))
    model = GpuModel(theirs, ours)
    driver = model.driver(model.runner())
    prompts = {"short": prompt_of(3, seed=1), "long": prompt_of(37, seed=2)}
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    driver.step({"short": 3, "long": 20})
    driver.step({"long": 17, "short": 1})
    for _ in range(NUM_TOKENS):
        driver.step({"short": 1, "long": 1})
    for name, prompt in prompts.items():
        assert_same_stream(theirs, prompt, driver.requests[name].output_token_ids[:NUM_TOKENS])
