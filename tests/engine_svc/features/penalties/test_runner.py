"""behaviours 107 to 109: penalties, one logit at a time."""

from __future__ import annotations

import random

import pytest
import torch

from tests.engine_svc.runner.sampler_rig import VOCAB_SIZE, SamplerRig, flat_logits, random_logits

PROMPT = [1, 2, 3, 40]
OUTPUT = [10, 11, 11, 12, 12, 12]


@pytest.mark.parametrize("penalty", [2.0, -2.0])
def test_107_presence_penalty_lowers_tokens_of_the_output_alone(penalty):
    rig = SamplerRig()
    rig.enter(0, prompt=PROMPT, output=OUTPUT, presence_penalty=penalty)
    row = rig.changed(flat_logits(1), [0])[0]
    lowest, highest = int(row.argmin()), int(row.argmax())
    assert (lowest in OUTPUT) == (penalty > 0)
    assert (highest in OUTPUT) == (penalty < 0)
    expected = flat_logits(1)[0]
    expected[[10, 11, 12]] = -penalty
    assert torch.equal(row, expected)


@pytest.mark.parametrize("penalty", [2.0, -2.0])
def test_108_frequency_penalty_counts_each_time(penalty):
    rig = SamplerRig()
    rig.enter(0, prompt=[*PROMPT, 12], output=OUTPUT, frequency_penalty=penalty)
    row = rig.changed(flat_logits(1), [0])[0]
    assert int(row.argmin() if penalty > 0 else row.argmax()) == 12
    expected = flat_logits(1)[0]
    expected[[10, 11, 12]] = torch.tensor([-penalty, -2 * penalty, -3 * penalty])
    assert torch.equal(row, expected)


@pytest.mark.parametrize("penalty", [1.9, 0.1])
def test_109_repetition_penalty_weakens_what_prompt_or_output_have(penalty):
    rig = SamplerRig()
    rig.enter(0, prompt=PROMPT, output=OUTPUT, repetition_penalty=penalty)
    seen = sorted({*PROMPT, *OUTPUT})
    for value in (1.5, -1.5):
        row = rig.changed(flat_logits(1, value), [0])[0]
        expected = flat_logits(1, value)[0]
        expected[seen] = value / torch.tensor(penalty) if value > 0 else value * torch.tensor(penalty)
        assert torch.equal(row, expected)
        assert all((row[token] < value) == (penalty > 1) for token in seen)


def test_penalties_together_are_repetition_then_frequency_then_presence():
    rig = SamplerRig(max_num_seqs=3)
    logits = random_logits(3)
    tokens = {row: random.Random(row).choices(range(VOCAB_SIZE), k=9 * (row + 1)) for row in range(3)}
    for row in range(3):
        rig.enter(
            row, prompt=tokens[row][:5], output=tokens[row][5:], presence_penalty=0.3 * row,
            frequency_penalty=-0.2, repetition_penalty=1.3,
        )  # fmt: skip
    changed = rig.changed(logits, [2, 0, 1])
    for index, row in enumerate([2, 0, 1]):
        for token in range(VOCAB_SIZE):
            value = float(logits[index, token])
            if token in tokens[row]:
                value = value / 1.3 if value > 0 else value * 1.3
            count = tokens[row][5:].count(token)
            value -= -0.2 * count
            value -= 0.3 * row * (count > 0)
            assert float(changed[index, token]) == pytest.approx(value, abs=1e-5)


def test_counts_of_one_step_are_gone_in_the_next():
    rig = SamplerRig()
    rig.enter(0, output=[5, 5], frequency_penalty=1.0)
    first = rig.changed(flat_logits(1), [0])
    assert torch.equal(rig.changed(flat_logits(1), [0]), first)
    rig.append(0, 6)
    assert rig.changed(flat_logits(1), [0])[0, [5, 6]].tolist() == [-2.0, -1.0]


def test_rows_are_counted_one_after_the_other_where_the_vocabulary_is_large():
    vocab_size = (1 << 23) + 1
    rig = SamplerRig(vocab_size=vocab_size, max_num_seqs=2)
    rig.enter(0, output=[5, 5], frequency_penalty=1.0)
    rig.enter(1, output=[5, vocab_size - 1], presence_penalty=0.5)
    logits = torch.zeros(2, vocab_size)
    rig.choose(logits, [0, 1])
    assert logits[0].nonzero().flatten().tolist() == [5]
    assert logits[1].nonzero().flatten().tolist() == [5, vocab_size - 1]
    assert (float(logits[0, 5]), float(logits[1, 5])) == (-2.0, -0.5)
