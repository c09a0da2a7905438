"""behaviour 116: what is told of tokens, sampled and of the prompt."""

from __future__ import annotations

import pytest
import torch

from engine_svc.runner.sampler import LogprobsMode
from tests.engine_svc.runner.sampler_rig import VOCAB_SIZE, SamplerRig, random_logits


def by_index(rig: SamplerRig, logits: torch.Tensor, rows: list[int]) -> tuple[list[int], dict]:
    sampled = rig.choose(logits.clone(), rows)
    return sampled.token_ids.tolist(), {} if sampled.logprobs is None else sampled.logprobs.by_index()


def test_116_nothing_is_told_where_nobody_asked():
    rig = SamplerRig()
    rig.enter(0, prompt_logprobs=3)
    assert rig.choose(random_logits(1), [0]).logprobs is None
    rig.enter(1, logprobs=0)
    _, told = by_index(rig, random_logits(2), [0, 1])
    assert list(told) == [1]


@pytest.mark.parametrize("vocab_size", [2, 129, 5000])
def test_116_entries_are_within_1e_4_of_log_softmax_and_ranked_by_it(vocab_size):
    num_rows = 12
    rig = SamplerRig(vocab_size=vocab_size)
    wanted = [0, 1, 2, -1, 20, 1]
    for row in range(num_rows):
        rig.enter(row, prompt=[0, 1], temperature=row % 2, seed=row, logprobs=wanted[row % 6])
    logits = random_logits(num_rows, vocab_size=vocab_size)
    expected = logits.double().log_softmax(-1)
    tokens, told = by_index(rig, logits, list(range(num_rows)))
    for row in range(num_rows):
        own = expected[row, tokens[row]]
        k = vocab_size if wanted[row % 6] == -1 else min(wanted[row % 6], vocab_size)
        assert told[row].logprobs == [pytest.approx(float(own), abs=1e-4)]
        rounded = logits[row].log_softmax(-1)
        assert told[row].ranks == [int((rounded >= rounded[tokens[row]]).sum())]
        assert told[row].k == k == len(set(told[row].top_token_ids))
        assert told[row].top_logprobs == rounded[told[row].top_token_ids].tolist()
        best = expected[row].topk(k).values.tolist()
        assert told[row].top_logprobs == pytest.approx(best, abs=1e-4)
        assert max(told[row].top_logprobs, default=0.0) <= 0.0


def test_116_the_rank_counts_all_that_are_as_likely():
    rig = SamplerRig()
    rig.enter(0, logprobs=0, allowed_token_ids=frozenset({9}))
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [3, 4]] = 1.0
    logits[0, 5] = -1.0
    assert by_index(rig, logits, [0])[1][0].ranks == [VOCAB_SIZE - 1]


def test_116_ids_that_are_asked_for_stand_behind_the_most_likely():
    rig = SamplerRig()
    rig.enter(0, logprobs=2, logprob_token_ids=(40, 3, 40))
    rig.enter(1, logprob_token_ids=(7,))
    logits = random_logits(2)
    expected = logits.log_softmax(-1)
    _, told = by_index(rig, logits, [0, 1])
    assert told[0].k == 5
    assert told[0].top_token_ids == [*logits[0].topk(2).indices.tolist(), 40, 3, 40]
    assert told[0].top_logprobs[2:] == expected[0, [40, 3, 40]].tolist()
    assert (told[1].k, told[1].top_token_ids) == (1, [7])


def test_116_raw_is_before_every_change_and_processed_is_what_was_drawn_from():
    wish = {
        "temperature": 0.5, "top_k": 4, "logprobs": -1, "logit_bias": ((3, 9.0),), "repetition_penalty": 1.5,
        "bad_words": ((8,),),
    }  # fmt: skip
    logits = random_logits(1)
    logits[0, 8] = 30.0
    rows = {}
    for mode in LogprobsMode:
        rig = SamplerRig(mode=mode)
        rig.enter(0, prompt=[3, 4], **wish)
        tokens, told = by_index(rig, logits, [0])
        rows[mode] = torch.empty(VOCAB_SIZE)
        rows[mode][told[0].top_token_ids] = torch.tensor(told[0].top_logprobs)
        assert told[0].logprobs[0] == rows[mode][tokens[0]]
    changed = rig.changed(logits, [0])[0]
    kept = changed.topk(4).indices
    drawn_from = torch.full((VOCAB_SIZE,), float("-inf"))
    drawn_from[kept] = changed[kept] / 0.5
    assert torch.equal(rows[LogprobsMode.RAW_LOGITS], logits[0])
    assert torch.equal(rows[LogprobsMode.RAW_LOGPROBS], logits[0].log_softmax(-1))
    assert torch.equal(rows[LogprobsMode.PROCESSED_LOGITS], drawn_from)
    assert torch.equal(rows[LogprobsMode.PROCESSED_LOGPROBS], drawn_from.log_softmax(-1))
    assert rows[LogprobsMode.RAW_LOGITS].max() > 0.0
    assert rows[LogprobsMode.PROCESSED_LOGITS].max() > 0.0
    for mode in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS):
        assert rows[mode].max() <= 0.0
        assert float(rows[mode].exp().sum()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("cut", [{}, {"top_k": 40}, {"top_k": 2}, {"min_p": 0.1}, {"top_p": 0.9}], ids=str)
def test_116_only_what_a_cut_takes_is_minus_infinity(cut):
    # Two tokens are likely; all others are too unlikely for a float, and are not cut away by that.
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32)[None] / VOCAB_SIZE
    logits[0, :2] = 500.0
    rig = SamplerRig(mode=LogprobsMode.PROCESSED_LOGITS)
    rig.enter(0, temperature=0.5, logprobs=-1, seed=1, **cut)
    _, told = by_index(rig, logits.clone(), [0])
    found = torch.empty(VOCAB_SIZE)
    found[told[0].top_token_ids] = torch.tensor(told[0].top_logprobs)
    expected = logits[0] / 0.5
    if cut and cut.get("top_k") != 40:
        expected[2:] = float("-inf")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("num_places", [0, 1, 17])
def test_116_prompt_places_are_told_of_by_the_logits_before_them(num_places):
    rig = SamplerRig()
    rig.enter(0, prompt_logprobs=3, logprob_token_ids=(6,))
    rig.enter(1, logprobs=3)
    assert [rig.sampler.prompt_places(row, 0, 4) is not None for row in (0, 1, 2)] == [True, False, False]
    logits = random_logits(num_places)
    tokens = torch.arange(num_places) * 2
    told = rig.sampler.prompt_logprobs(logits, tokens, 0).tell()
    expected = logits.log_softmax(-1)
    own = expected[torch.arange(num_places), tokens]
    assert told.logprobs == own.tolist()
    assert told.ranks == (expected >= own[:, None]).sum(-1).tolist()
    assert told.k == 4
    for place in range(num_places):
        ids = told.top_token_ids[4 * place : 4 * place + 4]
        assert ids == [*expected[place].topk(3).indices.tolist(), 6]
        assert told.top_logprobs[4 * place : 4 * place + 4] == expected[place, ids].tolist()


def test_116_a_long_prompt_is_looked_at_in_parts_that_add_up():
    vocab_size = (1 << 24) // 3
    rig = SamplerRig(vocab_size=vocab_size, max_num_seqs=2)
    rig.enter(0, prompt_logprobs=1)
    logits = torch.zeros(5, vocab_size)
    logits[torch.arange(5), torch.arange(5) * 100] = torch.arange(5) + 1.0
    told = rig.sampler.prompt_logprobs(logits, torch.arange(5) * 100, 0).tell()
    assert told.ranks == [1] * 5
    assert told.top_token_ids == [0, 100, 200, 300, 400]
    assert told.top_logprobs == told.logprobs == sorted(told.logprobs)
