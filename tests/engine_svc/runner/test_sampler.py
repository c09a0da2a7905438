"""Rows of one batch, each sampled as it wishes, and as if it were alone."""

from __future__ import annotations

import pytest
import torch

from engine_svc.core.sampling_params import ThinkingBudget
from engine_svc.runner.sampler import LogprobsMode
from engine_svc.runner.sampling.logprobs import SampledLogprobs
from tests.engine_svc.runner.sampler_rig import VOCAB_SIZE, SamplerRig, random_logits

# Every feature, alone and with others.
WISHES = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 5, "seed": 2**63 + 9},
    {"temperature": 1.3, "top_p": 0.6, "seed": 5},
    {"temperature": 1.0, "min_p": 0.2, "seed": 6},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "seed": 7, "logprobs": 3},
    {"presence_penalty": 1.5, "logprobs": 0},
    {"frequency_penalty": -0.7, "temperature": 1.0, "seed": 8},
    {"repetition_penalty": 1.9, "logprobs": -1},
    {"presence_penalty": 2.0, "frequency_penalty": 0.3, "repetition_penalty": 0.5, "temperature": 0.5},
    {"logit_bias": ((4, 8.0), (9, -3.5)), "temperature": 1.0, "seed": 9},
    {"allowed_token_ids": frozenset({3, 8, 41}), "temperature": 1.0, "seed": 10, "logprobs": 3},
    {"bad_words": ((5,), (7, 9), (1, 7, 9, 11), (2, 11)), "temperature": 2.0, "seed": 11},
    {"min_tokens": 9, "eos_token_id": 2, "stop_token_ids": frozenset({6}), "logprob_token_ids": (2, 6)},
    {
        "temperature": 1.1, "top_k": 30, "top_p": 0.95, "min_p": 0.001, "seed": 12, "presence_penalty": 0.4,
        "repetition_penalty": 1.2, "logit_bias": ((7, 2.0),), "bad_words": ((3, 4), (8,)), "min_tokens": 3,
        "eos_token_id": 2, "allowed_token_ids": frozenset(range(30)), "logprobs": 5,
    },
    {"thinking": ThinkingBudget(1, (7,), (9, 4)), "temperature": 1.0, "seed": 13},
]  # fmt: skip
OUTPUTS = [[4, 7, 9], [9, 9, 9, 3], [], [1, 7, 9]]


def told(logprobs: SampledLogprobs | None) -> dict:
    return {} if logprobs is None else logprobs.by_index()


@pytest.mark.parametrize("mode", LogprobsMode)
def test_a_row_of_a_batch_that_mixes_all_features_equals_that_row_alone(mode):
    num = len(WISHES)
    mixed = SamplerRig(max_num_seqs=num, mode=mode)
    order = [(7 * index) % num for index in range(num)]
    rows_of = dict(zip(order, range(num), strict=True))
    for index, wish in enumerate(WISHES):
        mixed.enter(rows_of[index], prompt=[1, index, 3], output=OUTPUTS[index % 4], **wish)
    logits = random_logits(num)
    written = logits.clone()
    together = mixed.choose(written, [rows_of[index] for index in range(num)])
    of_together = told(together.logprobs)
    assert set(of_together) == {5, 6, 8, 11, 13, 14}
    for index, wish in enumerate(WISHES):
        alone = SamplerRig(max_num_seqs=2, mode=mode)
        alone.enter(1, prompt=[1, index, 3], output=OUTPUTS[index % 4], **wish)
        alone_written = logits[index : index + 1].clone()
        sampled = alone.choose(alone_written, [1])
        assert int(sampled.token_ids) == int(together.token_ids[index])
        assert torch.equal(alone_written[0], written[index])
        assert told(sampled.logprobs).get(0) == of_together.get(index)


def test_rows_of_a_large_vocabulary_are_bitwise_those_alone():
    vocab_size = 33_000
    rig = SamplerRig(vocab_size=vocab_size)
    for row in range(8):
        rig.enter(
            row, prompt=[5, 6, row], temperature=0.5 + row / 8, top_k=40 * (row % 3), top_p=1.0 - row / 16,
            min_p=row * 1e-4, seed=row, logprobs=row, repetition_penalty=1.0 + row / 8,
        )  # fmt: skip
    logits = random_logits(8, vocab_size=vocab_size)
    together = rig.choose(logits.clone(), range(8))
    for row in range(8):
        alone = rig.choose(logits[row : row + 1].clone(), [row])
        assert int(alone.token_ids) == int(together.token_ids[row])
        assert told(alone.logprobs)[0] == told(together.logprobs)[row]


def test_temperature_zero_takes_the_largest_logit():
    rig = SamplerRig()
    for row in range(4):
        rig.enter(row, top_k=1 + row, top_p=0.5, min_p=0.5)
    logits = random_logits(4)
    sampled = rig.choose(logits.clone(), range(4))
    assert sampled.token_ids.tolist() == logits.argmax(-1).tolist()
    assert sampled.highest.isfinite().all()
    assert sampled.logprobs is None


def test_a_batch_without_features_leaves_the_logits_as_they_are():
    rig = SamplerRig()
    rig.enter(0)
    rig.enter(1, temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, seed=4)
    logits = random_logits(2)
    assert torch.equal(rig.changed(logits, [0, 1]), logits)


def test_rows_without_a_finite_largest_logit_have_no_token_and_others_have_theirs():
    spoiled = {0: (3, float("nan")), 1: (49, float("inf")), 3: (7, float("nan"))}
    wishes = [
        {},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.0, "seed": 3, "top_p": 0.7, "logprobs": 2},
        {"temperature": 0.5, "presence_penalty": 1.0, "min_p": 0.1, "logprobs": 2},
        {"repetition_penalty": 1.5, "logprobs": 2},
    ]
    rig = SamplerRig()
    for row, wish in enumerate(wishes):
        rig.enter(row, output=[7, 7], **wish)
    logits = random_logits(5)
    clean = rig.choose(logits.clone(), range(5))
    for row, (token, value) in spoiled.items():
        logits[row, token] = value
    sampled = rig.choose(logits, range(5))
    assert sampled.highest.isfinite().tolist() == [False, False, True, False, True]
    for row in (2, 4):
        assert sampled.token_ids[row] == clean.token_ids[row]
        assert told(sampled.logprobs)[row] == told(clean.logprobs)[row]


def test_a_row_with_no_token_left_has_none():
    rig = SamplerRig()
    rig.enter(0, allowed_token_ids=frozenset({2}), min_tokens=1, eos_token_id=2)
    rig.enter(1)
    assert rig.choose(random_logits(2), [0, 1]).highest.isfinite().tolist() == [False, True]


def test_a_row_that_left_takes_nothing_along():
    rig = SamplerRig(max_num_seqs=1)
    logits = random_logits(1)
    for wish in WISHES:
        rig.enter(0, **wish)
        rig.choose(logits.clone(), [0])
        rig.leave(0)
        rig.enter(0)
        assert torch.equal(rig.changed(logits, [0]), logits)
        assert rig.choose(logits.clone(), [0]).logprobs is None
        rig.leave(0)


@pytest.mark.parametrize("index", range(len(WISHES)))
def test_a_resumed_request_continues_as_if_it_had_never_left(index):
    steps = [random_logits(1, seed=seed) for seed in range(12)]
    prompt, wish = [4, 9, 1], WISHES[index]
    whole = SamplerRig()
    whole.enter(0, prompt=prompt, **wish)
    tokens = whole.generate(0, steps)
    for cut in (1, 5, 11):
        resumed = SamplerRig()
        resumed.enter(3, prompt=prompt, output=tokens[:cut], **wish)
        assert resumed.generate(3, steps[cut:]) == tokens[cut:]


def test_processors_change_what_is_sampled_from_in_order():
    def only_four(logits, rows):
        assert rows.tolist() == [1, 0]
        masked = torch.full((VOCAB_SIZE, 2), float("-inf")).T
        masked[:, 4] = 0.0
        return masked

    def then_five(logits, rows):
        logits[1, 5] = 100.0
        return logits

    rig = SamplerRig(processors=(only_four, then_five))
    rig.enter(0, logit_bias=((6, 1.0),))
    rig.enter(1)
    assert rig.choose(random_logits(2), [1, 0]).token_ids.tolist() == [4, 5]


def test_logits_of_half_precision_are_sampled_from_and_not_written():
    rig = SamplerRig()
    rig.enter(0, logit_bias=((6, 50.0),))
    logits = random_logits(1).bfloat16()
    kept = logits.clone()
    assert int(rig.choose(logits, [0]).token_ids) == 6
    assert torch.equal(logits, kept)
