"""Rows of one batch, each sampled as it wishes."""

from __future__ import annotations

import numpy as np
import torch

from engine_svc.runner.input_batch import InputBatch
from engine_svc.runner.sampler import Sampler
from engine_svc.sampling_params import SamplingParams
from engine_svc.step import AdmittedRequest, StepPlan

VOCAB_SIZE = 30


def batch_of(wishes: list[dict[str, object]], *, num_tokens: int = 5) -> tuple[InputBatch, np.ndarray]:
    """A batch with one row per entry and all its rows, in order."""
    num_rows = len(wishes)
    batch = InputBatch(max_num_seqs=num_rows, max_model_len=64, block_size=4, vocab_size=VOCAB_SIZE)
    names = [str(index) for index in range(num_rows)]
    step = StepPlan(
        0,
        admitted=[
            AdmittedRequest(
                name, [1] * num_tokens, num_tokens, SamplingParams(**{"max_tokens": 9, **wish}), [[]]
            )
            for name, wish in zip(names, wishes, strict=True)
        ],
        request_ids=names,
        num_tokens=[num_tokens] * num_rows,
        num_computed_tokens=[0] * num_rows,
        new_block_ids=[[[2 * index, 2 * index + 1]] for index in range(num_rows)],
        draft_token_ids=[[] for _ in names],
        samples=[True] * num_rows,
    )
    batch.apply(step)
    return batch, batch.gather(step).sampling_rows


def random_logits(num_rows: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def test_temperature_zero_takes_the_largest_logit():
    batch, rows = batch_of([{"temperature": 0.0}] * 4)
    logits = random_logits(4)
    tokens, is_valid = Sampler().choose(logits, batch, rows)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert is_valid.all()


def test_a_row_draws_the_same_token_in_every_company():
    wishes = [
        {"temperature": 0.5 * i, "top_k": 3 * i, "top_p": 1.0 - 0.1 * i, "seed": 11 * i} for i in range(6)
    ]
    logits = random_logits(6)
    batch, rows = batch_of(wishes)
    together, _ = Sampler().choose(logits.clone(), batch, rows)
    for index, wish in enumerate(wishes):
        alone_batch, alone_rows = batch_of([wish])
        alone, _ = Sampler().choose(logits[index : index + 1].clone(), alone_batch, alone_rows)
        assert alone[0] == together[index]


def test_draws_follow_the_softmax_over_seeds_and_over_positions():
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = torch.full((1, VOCAB_SIZE), float("-inf"))
    logits[0, 3:7] = probabilities.log()
    num = 4000
    batch, rows = batch_of([{"seed": seed} for seed in range(num)])
    by_seed, _ = Sampler().choose(logits.expand(num, -1).clone(), batch, rows)
    by_position = []
    batch, rows = batch_of([{"seed": 5}])
    for position in range(num):
        batch.lengths[rows] = position
        by_position.append(int(Sampler().choose(logits.clone(), batch, rows)[0][0]))
    for tokens in (torch.from_numpy(by_seed), torch.tensor(by_position)):
        counts = torch.bincount(tokens, minlength=VOCAB_SIZE)[3:7]
        assert int(counts.sum()) == num
        assert ((counts - probabilities * num) ** 2 / (probabilities * num)).sum() < 16.3


def test_rows_without_a_finite_largest_logit_have_no_token():
    batch, rows = batch_of([{"temperature": 0.0}, {}, {}, {}])
    logits = random_logits(4)
    logits[0, 3], logits[1, 29], logits[2, :] = float("nan"), float("inf"), float("-inf")
    tokens, is_valid = Sampler().choose(logits, batch, rows)
    assert is_valid.tolist() == [False, False, False, True]
    assert 0 <= tokens[3] < VOCAB_SIZE


def test_ends_cannot_be_chosen_before_min_tokens_and_can_after():
    wish = {"temperature": 0.0, "min_tokens": 2, "eos_token_id": 7, "stop_token_ids": frozenset({8})}
    batch, rows = batch_of([wish, {**wish, "ignore_eos": True}, {**wish, "min_tokens": 0}])
    logits = random_logits(3)
    logits[:, 7], logits[:, 8], logits[:, 9] = 9.0, 8.0, 7.0
    assert Sampler().choose(logits.clone(), batch, rows)[0].tolist() == [9, 7, 7]
    batch.lengths[rows] += 2
    assert Sampler().choose(logits.clone(), batch, rows)[0].tolist() == [7, 7, 7]


def test_processors_change_what_is_sampled_from_in_order():
    def only_four(logits, _batch, rows):
        assert rows == [0, 1]
        masked = torch.full_like(logits, float("-inf"))
        masked[:, 4] = 0.0
        return masked

    def then_five(logits, _batch, _rows):
        logits[1, 5] = 100.0
        return logits

    batch, rows = batch_of([{}, {}])
    order = rows.argsort()
    tokens, _ = Sampler([only_four, then_five]).choose(random_logits(2), batch, rows[order])
    assert tokens.tolist() == [4, 5]
