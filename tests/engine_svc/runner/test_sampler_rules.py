"""behaviours 107 to 112, 114 and 127: penalties, bans, bias and budgets, one logit at a time."""

from __future__ import annotations

import random

import pytest
import torch

from engine_svc.core.sampling_params import ThinkingBudget
from tests.engine_svc.runner.sampler_rig import VOCAB_SIZE, SamplerRig, random_logits

PROMPT = [1, 2, 3, 40]
OUTPUT = [10, 11, 11, 12, 12, 12]


def flat_logits(num_rows: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((num_rows, VOCAB_SIZE), value)


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


def test_110_only_allowed_ids_are_left_and_rows_without_the_option_are_untouched():
    rig = SamplerRig()
    rig.enter(0, allowed_token_ids=frozenset({4, 49}))
    rig.enter(1)
    rig.enter(2, allowed_token_ids=frozenset({0, 10**9}))
    logits = random_logits(3)
    changed = rig.changed(logits, [0, 1, 2])
    for index, allowed in ((0, [4, 49]), (2, [0])):
        assert torch.equal(changed[index, allowed], logits[index, allowed])
        assert int(changed[index].isneginf().sum()) == VOCAB_SIZE - len(allowed)
    assert torch.equal(changed[1], logits[1])


def banned(rig: SamplerRig, row: int) -> list[int]:
    return rig.changed(random_logits(1), [row])[0].isneginf().nonzero().flatten().tolist()


def test_111_bad_words_of_one_token_always_and_of_several_only_behind_their_prefix():
    rig = SamplerRig()
    rig.enter(0, bad_words=((5,), (7, 8), (6, 7, 9), (7, 9)))
    assert banned(rig, 0) == [5]
    rig.append(0, 7)
    assert banned(rig, 0) == [5, 8, 9]
    rig.append(0, 6)
    assert banned(rig, 0) == [5]
    rig.append(0, 7)
    assert banned(rig, 0) == [5, 8, 9]
    rig.append(0, 1)
    assert banned(rig, 0) == [5]


def test_111_a_prefix_that_the_prompt_ends_with_forbids_nothing():
    rig = SamplerRig()
    rig.enter(0, prompt=[4, 7], bad_words=((7, 8), (4, 7, 9)))
    assert banned(rig, 0) == []
    # Longer than all that is known.
    rig.enter(1, prompt=[1], bad_words=((2, 3, 4, 5, 6),))
    assert banned(rig, 1) == []


def test_111_of_two_words_with_the_same_end_one_is_enough():
    rig = SamplerRig()
    rig.enter(0, output=[3, 4], bad_words=((9, 8), (4, 8), (7, 8)))
    rig.enter(1, output=[3, 4], bad_words=((9, 8), (5, 8)))
    assert (banned(rig, 0), banned(rig, 1)) == ([8], [])


def test_112_logit_bias_adds_exactly_to_those_ids():
    rig = SamplerRig()
    rig.enter(0, logit_bias=((4, 2.5), (0, -100.0)))
    rig.enter(1)
    logits = random_logits(2)
    expected = logits.clone()
    expected[0, 4] += 2.5
    expected[0, 0] += -100.0
    assert torch.equal(rig.changed(logits, [0, 1]), expected)
    # In another order, as rows come and go.
    assert torch.equal(rig.changed(logits.flip(0), [1, 0]), expected.flip(0))


def test_112_a_bias_is_there_before_penalties():
    rig = SamplerRig()
    rig.enter(0, output=[4], logit_bias=((4, 3.0),), repetition_penalty=2.0)
    assert rig.changed(flat_logits(1, -1.0), [0])[0, 4] == 1.0


def test_114_ends_are_forbidden_until_the_minimum_and_free_after_it():
    rig = SamplerRig()
    ends = {"eos_token_id": 7, "stop_token_ids": frozenset({8, 10**9})}
    rig.enter(0, min_tokens=2, **ends)
    rig.enter(1, min_tokens=2, ignore_eos=True, **ends)
    rig.enter(2, **ends)
    expected = [[7, 8], [8], []]
    assert [banned(rig, row) for row in range(3)] == expected
    rig.append(0, 1)
    assert [banned(rig, row) for row in range(3)] == expected
    rig.append(0, 1)
    assert [banned(rig, row) for row in range(3)] == [[], [8], []]


def test_114_rules_follow_their_rows_through_every_order_and_reuse():
    choose = random.Random(3)
    rig = SamplerRig(max_num_seqs=8)
    ends: dict[int, int] = {}
    minimum: dict[int, int] = {}
    for _ in range(300):
        row = choose.randrange(8)
        if row in ends:
            rig.leave(row)
            del ends[row]
        else:
            ends[row], minimum[row] = choose.randrange(VOCAB_SIZE), choose.randrange(4)
            rig.enter(row, eos_token_id=ends[row], min_tokens=minimum[row])
        rows = choose.sample(sorted(ends), choose.randint(0, len(ends)))
        if not rows:
            continue
        is_forbidden = rig.changed(random_logits(len(rows)), rows).isneginf()
        for index, row in enumerate(rows):
            is_early = rig.lengths[row] < 3 + minimum[row]
            assert is_forbidden[index].nonzero().flatten().tolist() == ([ends[row]] if is_early else [])
            rig.append(row, 0)


def chosen_after(rig: SamplerRig, row: int) -> list[int]:
    """What may be chosen next."""
    return rig.changed(random_logits(1), [row])[0].isneginf().logical_not().nonzero().flatten().tolist()


@pytest.mark.parametrize("prompt", [[1, 40], [1, 40, 5, 41, 2, 40]], ids=["opened", "opened again"])
def test_127_when_the_budget_is_spent_the_end_marker_is_forced_token_by_token(prompt):
    rig = SamplerRig()
    everything = list(range(VOCAB_SIZE))
    rig.enter(0, prompt=prompt, thinking=ThinkingBudget(3, (40,), (41, 42)))
    for token in (5, 6, 7):
        assert chosen_after(rig, 0) == everything
        rig.append(0, token)
    for marker in (41, 42):
        assert chosen_after(rig, 0) == [marker]
        rig.append(0, marker)
    # Outside of a block nothing is counted.
    for token in range(8):
        assert chosen_after(rig, 0) == everything
        rig.append(0, token)


def test_127_counts_restart_for_a_new_block_and_one_that_ends_by_itself_is_left_alone():
    rig = SamplerRig()
    rig.enter(0, prompt=[1], thinking=ThinkingBudget(2, (40, 39), (41,)))
    for _ in range(2):
        for token in (40, 39, 5, 6):
            assert len(chosen_after(rig, 0)) == VOCAB_SIZE
            rig.append(0, token)
        assert chosen_after(rig, 0) == [41]
        rig.append(0, 41)
    for token in (40, 39, 5, 41, 6, 6, 6):
        assert len(chosen_after(rig, 0)) == VOCAB_SIZE
        rig.append(0, token)


@pytest.mark.parametrize(
    ("thoughts", "budget"),
    [([30], 0), ([30, 31, 32], 2), ([30, 31, 32, 33, 34], 2), ([30, 31, 41], 1), ([30, 41, 41, 42], 2)],
)
def test_127_a_prompt_that_is_beyond_its_budget_gets_the_whole_end_marker(thoughts, budget):
    rig = SamplerRig()
    rig.enter(0, prompt=[20, 40, *thoughts], thinking=ThinkingBudget(budget, (40,), (41, 42, 43)))
    marker = [41, 42, 43]
    begun = max(count for count in range(3) if thoughts[len(thoughts) - count :] == marker[:count])
    for token in marker[begun:]:
        assert chosen_after(rig, 0) == [token]
        rig.append(0, token)
    assert len(chosen_after(rig, 0)) == VOCAB_SIZE


def test_127_a_budget_of_nothing_ends_the_block_at_once_whatever_else_is_wished():
    rig = SamplerRig()
    rig.enter(
        0, prompt=[40], thinking=ThinkingBudget(0, (40,), (41,)), allowed_token_ids=frozenset({5}),
        bad_words=((41,),),
    )  # fmt: skip
    rig.enter(1, prompt=[40])
    assert chosen_after(rig, 0) == [41]
    assert len(chosen_after(rig, 1)) == VOCAB_SIZE
    rig.append(0, 41)
    assert chosen_after(rig, 0) == [5]
