"""behaviour 127: thinking budgets, one logit at a time."""

from __future__ import annotations

import pytest

from engine_svc.features.thinking_budget.extras import ThinkingBudget
from tests.engine_svc.runner.sampler_rig import VOCAB_SIZE, SamplerRig, random_logits


def chosen_after(rig: SamplerRig, row: int) -> list[int]:
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


def test_127_a_zero_budget_ends_the_block_at_once_whatever_the_other_options():
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
