"""behaviours 110 to 112: bans, bad words and bias, one logit at a time."""

from __future__ import annotations

import torch

from tests.engine_svc.runner.sampler_rig import VOCAB_SIZE, SamplerRig, random_logits


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


def test_111_bad_words_of_one_token_always_and_of_several_only_behind_their_prefix():
    rig = SamplerRig()
    rig.enter(0, bad_words=((5,), (7, 8), (6, 7, 9), (7, 9)))
    assert rig.banned(0) == [5]
    rig.append(0, 7)
    assert rig.banned(0) == [5, 8, 9]
    rig.append(0, 6)
    assert rig.banned(0) == [5]
    rig.append(0, 7)
    assert rig.banned(0) == [5, 8, 9]
    rig.append(0, 1)
    assert rig.banned(0) == [5]


def test_111_a_prefix_that_the_prompt_ends_with_forbids_nothing():
    rig = SamplerRig()
    rig.enter(0, prompt=[4, 7], bad_words=((7, 8), (4, 7, 9)))
    assert rig.banned(0) == []
    # Longer than all that is known.
    rig.enter(1, prompt=[1], bad_words=((2, 3, 4, 5, 6),))
    assert rig.banned(1) == []


def test_111_of_two_words_with_the_same_end_one_is_enough():
    rig = SamplerRig()
    rig.enter(0, output=[3, 4], bad_words=((9, 8), (4, 8), (7, 8)))
    rig.enter(1, output=[3, 4], bad_words=((9, 8), (5, 8)))
    assert (rig.banned(0), rig.banned(1)) == ([8], [])


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
