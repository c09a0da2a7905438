"""Prompts whose places are embeddings: bit by bit what the tokens of these embeddings yield, however cut."""

from __future__ import annotations

import random

import pytest
import torch

from engine_svc.features.prompt_embeds.extras import PromptEmbeds
from engine_svc.tensors.host_tensor import HostTensor
from tests.engine_svc.runner.fakes import LogitsOfAllRows
from tests.engine_svc.runner.test_model_runner import prompt_of, run_in_random_steps

IMPLEMENTATIONS = [
    ("llama", "native"), ("qwen3_moe", "native"), ("granite", "native"), ("llama", "transformers"),
    ("gpt2", "transformers"), ("gemma3", "transformers"), ("opt", "transformers"),
]  # fmt: skip
NUM_TOKENS = 12


def embeddings_of(model, token_ids: list[int]) -> torch.Tensor:
    """[T, hidden], as the checkpoint's own input embedding has them."""
    with torch.inference_mode():
        return model.theirs.get_input_embeddings()(torch.tensor(token_ids)).clone()


def embeds_at(model, prompt: list[int], positions: list[int]) -> PromptEmbeds:
    """The embeddings of the prompt's tokens at these places."""
    rows = embeddings_of(model, prompt)[positions]
    return PromptEmbeds(
        HostTensor("float32", tuple(rows.shape), rows.numpy().astype("<f4").tobytes()), tuple(positions)
    )


def add_embedded(driver, model, name: str, prompt: list[int], positions: list[int], **options: object):
    """A request that has embeddings at `positions`, and there no tokens."""
    hidden = [0 if place in positions else token for place, token in enumerate(prompt)]
    request = driver.add(name, hidden, **options)
    request.extras[PromptEmbeds] = embeds_at(model, prompt, positions)
    return request


@pytest.mark.parametrize(("family", "model_impl"), IMPLEMENTATIONS)
def test_embeddings_of_tokens_yield_what_the_tokens_yield(tiny_model, family, model_impl):
    model = tiny_model(family, model_impl)
    choose = random.Random(4)
    driver = model.driver(takes_embeds=True)
    plain, embedded = {}, {}
    for index, length in enumerate([1, 2, 17, 41]):
        prompt = prompt_of(length, seed=index)
        mixes = {"all": range(length), "odd": range(0, length, 2), "last": range(length - 1, length)}
        kind = choose.choice(sorted(mixes)) if length > 2 else "all"
        plain[f"plain{index}"] = driver.add(f"plain{index}", prompt)
        embedded[f"plain{index}"] = add_embedded(driver, model, f"embedded{index}", prompt, list(mixes[kind]))
    run_in_random_steps(driver, num_tokens=NUM_TOKENS, seed=9, preempt=True)
    for name, request in plain.items():
        assert embedded[name].output_token_ids == request.output_token_ids
    assert len({token for request in plain.values() for token in request.output_token_ids}) > 3


@pytest.mark.parametrize(("family", "model_impl"), IMPLEMENTATIONS)
def test_logits_of_a_mixed_prompt_are_those_of_its_tokens_to_the_last_bit(tiny_model, family, model_impl):
    model = tiny_model(family, model_impl)
    logits: list[torch.Tensor] = []

    keep = LogitsOfAllRows(lambda values, rows: logits.append(values.clone()))
    driver = model.driver(features=(keep,), takes_embeds=True)
    prompt = prompt_of(5, seed=1)
    driver.add("tokens", prompt)
    add_embedded(driver, model, "mixed", prompt, [2, 3])
    driver.step({"tokens": 5, "mixed": 5})
    driver.step({"tokens": 1, "mixed": 1})
    for step in logits:
        assert torch.equal(step[0], step[1])


def test_another_embedding_yields_other_logits(tiny_model):
    model = tiny_model("llama", "native")
    driver = model.driver(takes_embeds=True)
    prompt, other = prompt_of(30, seed=1), prompt_of(30, seed=2)
    add_embedded(driver, model, "a", prompt, list(range(30)))
    add_embedded(driver, model, "b", other, list(range(30)))
    for grants in [{"a": 30, "b": 30}] + [{"a": 1, "b": 1}] * 10:
        driver.step(grants)
    outputs = [driver.requests[name].output_token_ids for name in ("a", "b")]
    assert outputs[0] != outputs[1]


def test_a_row_that_is_used_again_has_no_embeddings_of_before(tiny_model):
    model = tiny_model("llama", "native")
    driver = model.driver(takes_embeds=True)
    prompt = prompt_of(9, seed=1)
    add_embedded(driver, model, "first", prompt_of(9, seed=5), list(range(9)))
    driver.step({"first": 9})
    driver.finish("first")
    driver.add("alone", prompt)
    driver.add("again", prompt)
    driver.step({"alone": 9, "again": 9})
    assert driver.requests["alone"].output_token_ids == driver.requests["again"].output_token_ids


def test_penalties_do_not_count_places_without_a_token(tiny_model):
    model = tiny_model("llama", "native")
    prompt = prompt_of(12, seed=3)
    options = {"repetition_penalty": 5.0}
    driver = model.driver(takes_embeds=True)
    # Tokens that a row has seen are made unlikely; a row of embeddings alone has seen none.
    driver.add("free", prompt)
    add_embedded(driver, model, "embedded", prompt, list(range(12)), **options)
    driver.step({"free": 12, "embedded": 12})
    assert driver.requests["embedded"].output_token_ids == driver.requests["free"].output_token_ids


def test_half_precision_embeddings_become_the_models_type_exactly(tiny_model):
    model = tiny_model("llama", "native")
    prompt = prompt_of(20, seed=8)
    rows = embeddings_of(model, prompt).bfloat16()
    driver = model.driver(takes_embeds=True)
    for name, dtype, raw in (
        ("half", "bfloat16", rows.view(torch.int16).numpy().tobytes()),
        ("full", "float32", rows.float().numpy().tobytes()),
    ):
        request = driver.add(name, [0] * 20)
        request.extras[PromptEmbeds] = PromptEmbeds(
            HostTensor(dtype, tuple(rows.shape), raw), tuple(range(20))
        )
    for grants in [{"half": 20, "full": 20}] + [{"half": 1, "full": 1}] * 8:
        driver.step(grants)
    assert driver.requests["half"].output_token_ids == driver.requests["full"].output_token_ids
