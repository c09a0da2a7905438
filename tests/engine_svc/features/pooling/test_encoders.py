"""Encoders: each prompt's result is transformers' of the prompt alone, in batches of any lengths."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_svc.core.pooling_spec import PoolingOptions
from engine_svc.features.pooling.extras import PoolingRequest
from tests.engine_svc.features.pooling.rig import PoolingRig
from tests.engine_svc.model.encoders import (
    FAMILIES,
    MAX_LENGTH,
    VOCAB_SIZE,
    add_sentence_modules,
    logits_alone,
    save_encoder,
    states_alone,
)

_LENGTHS = (1, 7, 30, 7, MAX_LENGTH, 2, 7)


def prompts_of(lengths: tuple[int, ...] = _LENGTHS) -> dict[str, list[int]]:
    # Ids of special tokens, the padding's among them, are the first ones.
    draw = random.Random(5)
    return {
        f"p{index}": [draw.randrange(5, VOCAB_SIZE) for _ in range(length)]
        for index, length in enumerate(lengths)
    }


def unit(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vector_is_the_normalized_state_of_the_first_token(tmp_path: Path, family: str) -> None:
    model = save_encoder(tmp_path, family)
    rig, prompts = PoolingRig(tmp_path), prompts_of()
    assert rig.facts.max_position == MAX_LENGTH
    for name, vector in rig.results(prompts, "embed").items():
        torch.testing.assert_close(vector, unit(states_alone(model, prompts[name])[0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_of_tokens_are_their_normalized_states(tmp_path: Path, family: str) -> None:
    model = save_encoder(tmp_path, family)
    prompts = prompts_of()
    for name, vectors in PoolingRig(tmp_path).results(prompts, "token_embed").items():
        torch.testing.assert_close(vectors, unit(states_alone(model, prompts[name])), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_of_prompts_and_of_tokens_have_their_probabilities(tmp_path: Path, family: str) -> None:
    for head, task in (("classify", "classify"), ("token_classify", "token_classify")):
        folder = tmp_path / head
        model = save_encoder(folder, family, head)
        prompts = prompts_of()
        results = PoolingRig(folder).results(prompts, task)
        assert len(results) == len(prompts)
        for name, scores in results.items():
            expected = logits_alone(model, prompts[name]).softmax(-1)
            torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_a_single_class_is_a_score_from_0_to_1(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "bert", "classify", num_labels=1)
    rig, prompts = PoolingRig(tmp_path), prompts_of()
    assert rig.facts.tasks == ("classify", "score")
    for name, score in rig.results(prompts, "score").items():
        expected = logits_alone(model, prompts[name]).sigmoid()
        torch.testing.assert_close(score, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("head", "num_labels"), [("classify", 3), ("classify", 1), ("token_classify", 3)])
@pytest.mark.parametrize("default", [True, False])
def test_a_batch_mixes_probabilities_and_logits(
    tmp_path: Path, head: str, num_labels: int, default: bool
) -> None:
    model = save_encoder(tmp_path, "bert", head, num_labels=num_labels)
    options = PoolingOptions(pooler_config=json.dumps({"use_activation": default}))
    rig, prompts = PoolingRig(tmp_path, pooling=options), prompts_of()
    task = "score" if num_labels == 1 else head
    chosen = {name: (True, False, None)[index % 3] for index, name in enumerate(prompts)}
    for name, activates in chosen.items():
        rig.add(name, prompts[name], PoolingRequest(task, activates=activates))
    results = rig.run()
    for name, activates in chosen.items():
        expected = logits_alone(model, prompts[name])
        if default if activates is None else activates:
            expected = expected.sigmoid() if num_labels == 1 else expected.softmax(-1)
        torch.testing.assert_close(results[name], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", ["mean", "max", "cls", "mean_sqrt_len_tokens", "lasttoken"])
def test_sentence_transformers_modules_make_the_vector(tmp_path: Path, method: str) -> None:
    model = save_encoder(tmp_path, "bert")
    add_sentence_modules(tmp_path, ("Pooling", {"pooling_mode": method}))
    prompts = prompts_of()
    for name, vector in PoolingRig(tmp_path).results(prompts, "embed").items():
        states = states_alone(model, prompts[name])
        expected = {
            "mean": states.mean(0),
            "max": states.amax(0),
            "cls": states[0],
            "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
            "lasttoken": states[-1],
        }[method]
        torch.testing.assert_close(vector, expected, atol=1e-5, rtol=0)


def test_a_vector_is_cut_before_it_is_normalized(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "bert")
    (vector,) = PoolingRig(tmp_path).results({"p": [9, 8, 7]}, "embed", 6).values()
    expected = unit(states_alone(model, [9, 8, 7])[0][:6])
    torch.testing.assert_close(vector, expected, atol=1e-5, rtol=0)


def test_tokens_of_a_second_text_have_their_own_type(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "bert", "classify", num_labels=1)
    rig, prompts = PoolingRig(tmp_path), prompts_of()
    starts = {name: len(token_ids) // 2 for name, token_ids in prompts.items()}
    for name, token_ids in prompts.items():
        rig.add(name, token_ids, PoolingRequest("score", second_text_start=starts[name]))
    rig.add("one text", prompts["p2"], PoolingRequest("score"))
    scores = rig.run()
    for name, token_ids in prompts.items():
        types = torch.tensor([[int(index >= starts[name]) for index in range(len(token_ids))]])
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([token_ids]), token_type_ids=types).logits[0]
        torch.testing.assert_close(scores[name], logits.sigmoid(), atol=1e-5, rtol=0)
    assert abs(scores["p2"] - scores["one text"]) > 1e-3


def test_a_model_with_one_type_ignores_where_a_second_text_begins(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "distilbert", "classify", num_labels=1)
    rig = PoolingRig(tmp_path)
    rig.add("p", [9, 8, 7], PoolingRequest("score", second_text_start=1))
    expected = logits_alone(model, [9, 8, 7]).sigmoid()
    torch.testing.assert_close(rig.run()["p"], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_a_prompt_whose_states_are_not_finite_alone_ends_without_a_result(tmp_path: Path, task: str) -> None:
    save_encoder(tmp_path, "bert")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["embeddings.word_embeddings.weight"][9] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    rig = PoolingRig(tmp_path)
    results = rig.results({"broken": [9, 9], "sound": [7, 8]}, task)
    assert results.keys() == {"sound"}
    assert rig.failed == {0: "the model's states are not finite"}
