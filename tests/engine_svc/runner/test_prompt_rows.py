"""What the runner tells of tokens of a real model: what transformers says of them, however steps are cut."""

from __future__ import annotations

import random

import pytest
import torch

from engine_svc.core.step import TokenLogprobs

PROMPT = [random.Random(4).randrange(3, 160) for _ in range(41)]


def expected_logprobs(model, token_ids: list[int]) -> torch.Tensor:
    """[places, V]: what transformers says of the token that follows each place."""
    with torch.inference_mode():
        return model.theirs(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def assert_told(told: TokenLogprobs, expected: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    """told: of the tokens [P], whose logprobs transformers has in expected [P, V]."""
    own = expected[torch.arange(len(token_ids)), torch.tensor(token_ids)]
    assert told.logprobs == pytest.approx(own.tolist(), abs=1e-4)
    assert told.k == num_top
    best = expected.topk(num_top, dim=-1).values.flatten().tolist()
    assert told.top_logprobs == pytest.approx(best, abs=1e-4)
    for rank, row, logprob in zip(told.ranks, expected, own, strict=True):
        assert int((row >= logprob + 1e-4).sum()) <= rank <= int((row >= logprob - 1e-4).sum())


@pytest.mark.parametrize("grants", [[41], [1, 40], [16, 16, 9], [40, 1], [5] * 8 + [1]], ids=str)
def test_prompt_places_are_told_of_as_their_chunks_are_computed(tiny_model, grants):
    model = tiny_model("llama")
    driver = model.driver()
    driver.add("asks", PROMPT, prompt_logprobs=3)
    driver.add("silent", PROMPT[:7])
    driver.add("samples", PROMPT[:9], logprobs=2, temperature=1.0)
    expected = expected_logprobs(model, PROMPT)
    whole = TokenLogprobs([], [], 3)
    for number, grant in enumerate(grants):
        others = {"silent": 7, "samples": 9} if number == 0 else {"silent": 1, "samples": 1}
        result = driver.step({"silent": others["silent"], "asks": grant, "samples": others["samples"]})
        assert set(result.logprobs) == {2}
        if not result.prompt_logprobs:
            continue
        ((row, places),) = result.prompt_logprobs.items()
        assert (row, places.first_position) == (1, 1 + len(whole.ranks))
        whole.extend(places.told)
    assert_told(whole, expected[:-1], PROMPT[1:], 3)
    # After its prompt nothing more is told, and its tokens are those of one that never asked.
    request = driver.requests["asks"]
    assert driver.step({"asks": 1}).prompt_logprobs == {}
    assert request.output_token_ids[0] == int(expected[-1].argmax())


def test_sampled_tokens_are_told_of_with_the_models_own_logprobs(tiny_model):
    model = tiny_model("llama")
    driver = model.driver()
    request = driver.add("a", PROMPT, logprobs=4, temperature=1.0, top_k=3, repetition_penalty=1.3, seed=5)
    told = TokenLogprobs([], [], 4)
    for _ in range(12):
        told.extend(driver.step({"a": request.num_pending_tokens}).logprobs[0])
    expected = expected_logprobs(model, request.token_ids)[len(PROMPT) - 1 : -1]
    assert_told(told, expected, request.output_token_ids, 4)


def test_a_prompt_of_one_token_is_told_of_as_nothing(tiny_model):
    driver = tiny_model("llama").driver()
    driver.add("a", PROMPT[:1], prompt_logprobs=2)
    result = driver.step({"a": 1})
    places = result.prompt_logprobs[0]
    assert (places.first_position, places.told.ranks, places.told.k) == (1, [], 2)
    assert len(result.sampled[0]) == 1


def test_a_preempted_request_is_told_of_its_prompt_again_but_not_of_its_output(tiny_model):
    driver = tiny_model("llama").driver()
    request = driver.add("a", PROMPT, prompt_logprobs=0, logprobs=0)
    first = driver.step({"a": len(PROMPT)}).prompt_logprobs[0]
    driver.step({"a": 1})
    driver.preempt("a")
    again = driver.step({"a": request.num_pending_tokens})
    assert again.prompt_logprobs[0].first_position == 1
    assert again.prompt_logprobs[0].told.logprobs == pytest.approx(first.told.logprobs, abs=1e-5)
    assert len(again.logprobs[0].ranks) == 1
