"""Both implementations on the GPU: token by token what transformers generates, in fp32."""

from __future__ import annotations

import pytest

from tests.engine_svc.runner.test_model_runner import (
    FAMILIES,
    NATIVE_FAMILIES,
    assert_same_stream,
    prompt_of,
    run_in_random_steps,
)

pytestmark = pytest.mark.gpu
NUM_TOKENS = 40
IMPLEMENTATIONS = [(family, "native") for family in NATIVE_FAMILIES] + [
    (family, "transformers") for family in FAMILIES
]


@pytest.mark.parametrize("is_deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize(("family", "model_impl"), IMPLEMENTATIONS)
def test_mixed_chunked_and_resumed_steps_produce_what_transformers_generates(
    gpu_model, family, model_impl, is_deterministic
):
    model = gpu_model(family, model_impl, is_deterministic)
    assert model.ours.implementation == model_impl
    driver = model.driver(model.runner())
    prompts = {f"r{index}": prompt_of(length, seed=index) for index, length in enumerate([1, 3, 17, 40, 70])}
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    run_in_random_steps(driver, num_tokens=NUM_TOKENS, seed=7, preempt=True)
    for name, prompt in prompts.items():
        assert_same_stream(model.theirs, prompt, driver.requests[name].output_token_ids[:NUM_TOKENS])
