"""Decoders: vectors of last tokens, in chunks and beside requests that sample."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from engine_svc.core.pooling_spec import PoolingOptions
from engine_svc.features.pooling.extras import PoolingRequest
from engine_svc.model.errors import UnsupportedModel
from tests.engine_svc.features.pooling.rig import PoolingRig
from tests.engine_svc.model.checkpoints import VOCAB_SIZE, make_checkpoint

_LENGTHS = (1, 20, 45, 3)
_BESIDE = PoolingOptions("generate", "embed")


def prompts_of() -> dict[str, list[int]]:
    draw = random.Random(7)
    return {
        f"p{index}": [draw.randrange(5, VOCAB_SIZE) for _ in range(length)]
        for index, length in enumerate(_LENGTHS)
    }


@torch.inference_mode()
def states_alone(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    states: Tensor = model.base_model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.float(), dim=-1)


@pytest.mark.parametrize(
    ("family", "model_impl"),
    [
        *((family, kind) for family in ("qwen2", "qwen3", "gemma3") for kind in ("native", "transformers")),
        *((family, "transformers") for family in ("gpt2", "opt")),
    ],
)
def test_a_vector_is_the_normalized_state_of_the_last_token(
    tmp_path: Path, family: str, model_impl: str
) -> None:
    model = make_checkpoint(family, tmp_path)
    rig = PoolingRig(
        tmp_path, pooling=PoolingOptions("pooling"), model_impl=model_impl, max_num_batched_tokens=16
    )
    assert rig.facts.tasks == ("embed", "token_embed")
    prompts = prompts_of()
    results = rig.results(prompts, "embed")
    assert results.keys() == prompts.keys()
    for name, vector in results.items():
        expected = states_alone(model, prompts[name])[-1]
        torch.testing.assert_close(vector, expected, atol=1e-5, rtol=0)


def test_vectors_of_tokens_are_whole_after_chunks(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path)
    rig = PoolingRig(tmp_path, pooling=_BESIDE, max_num_batched_tokens=16)
    prompts = prompts_of()
    for name, vectors in rig.results(prompts, "token_embed").items():
        torch.testing.assert_close(vectors, states_alone(model, prompts[name]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", ["MEAN", "MAX"])
def test_a_method_over_all_tokens_sees_those_of_earlier_chunks(tmp_path: Path, method: str) -> None:
    model = make_checkpoint("qwen3", tmp_path)
    config = f'{{"pooling_type": "{method}", "normalize": false}}'
    rig = PoolingRig(tmp_path, pooling=PoolingOptions("pooling", "auto", config), max_num_batched_tokens=16)
    prompts = prompts_of()
    for name, vector in rig.results(prompts, "embed").items():
        with torch.inference_mode():
            states = model.base_model(input_ids=torch.tensor([prompts[name]])).last_hidden_state[0]
        expected = states.mean(0) if method == "MEAN" else states.amax(0)
        torch.testing.assert_close(vector, expected, atol=1e-4, rtol=0)


def test_requests_that_sample_are_undisturbed_beside_it(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    alone = PoolingRig(tmp_path, pooling=_BESIDE)
    alone.add("sampled", [9, 8, 7, 6], None)
    alone.run()
    rig, prompts = PoolingRig(tmp_path, pooling=_BESIDE, max_num_batched_tokens=16), prompts_of()
    assert rig.facts.tasks == ("generate", "embed", "token_embed")
    rig.add("sampled", [9, 8, 7, 6], None)
    for name, token_ids in prompts.items():
        rig.add(name, token_ids, PoolingRequest("embed"))
    assert rig.run().keys() == prompts.keys()
    assert rig.outputs["sampled"] == alone.outputs["sampled"]


def test_without_a_pooler_its_requests_alone_end(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    rig = PoolingRig(tmp_path)
    rig.add("sampled", [9, 8, 7, 6], None)
    rig.add("pooled", [9, 8, 7], PoolingRequest("embed"))
    assert rig.run() == {}
    assert rig.failed == {1: "PoolingRows failed: ValueError: the model has no pooler"}
    assert len(rig.outputs["sampled"]) == 2


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_the_head_for_tokens_of_a_model_that_only_pools_is_not_reported_as_unused(
    tmp_path: Path, model_impl: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint("qwen2", tmp_path, tie_word_embeddings=False)
    PoolingRig(tmp_path, pooling=PoolingOptions("pooling"), model_impl=model_impl)
    assert "does not use" not in caplog.text


def test_a_model_whose_forward_returns_no_states_is_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama", tmp_path)
    # The decoder that returns them is then not found.
    monkeypatch.setattr(LlamaForCausalLM, "base_model_prefix", "")
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM returns no hidden states to pool"):
        PoolingRig(tmp_path, pooling=PoolingOptions("pooling"), model_impl="transformers")
