"""Rows of one batch, each sampled by its own parameters, and as if it were alone."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from engine_svc.features.thinking_budget.extras import ThinkingBudget
from engine_svc.runner.sampler import LogprobsMode
from engine_svc.runner.sampling.logprobs import SampledLogprobs
from tests.engine_svc.runner.fakes import LogitsOfAllRows
from tests.engine_svc.runner.sampler_rig import CPU, VOCAB_SIZE, SamplerRig, flat_logits, random_logits
from triptych_kernels import REFERENCE, ops_for
from triptych_kernels.reference.sampling import kept_weights

# Every feature, alone and with others.
SAMPLING_OPTIONS = [
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


def entries_of(logprobs: SampledLogprobs | None) -> dict:
    return {} if logprobs is None else logprobs.by_index()


@pytest.mark.parametrize("mode", LogprobsMode)
def test_a_row_of_a_batch_that_mixes_all_features_equals_that_row_alone(mode):
    num = len(SAMPLING_OPTIONS)
    mixed = SamplerRig(max_num_seqs=num, mode=mode)
    order = [(7 * index) % num for index in range(num)]
    rows_of = dict(zip(order, range(num), strict=True))
    for index, options in enumerate(SAMPLING_OPTIONS):
        mixed.enter(rows_of[index], prompt=[1, index, 3], output=OUTPUTS[index % 4], **options)
    logits = random_logits(num)
    written = logits.clone()
    together = mixed.choose(written, [rows_of[index] for index in range(num)])
    of_together = entries_of(together.logprobs)
    assert set(of_together) == {5, 6, 8, 11, 13, 14}
    for index, options in enumerate(SAMPLING_OPTIONS):
        alone = SamplerRig(max_num_seqs=2, mode=mode)
        alone.enter(1, prompt=[1, index, 3], output=OUTPUTS[index % 4], **options)
        alone_written = logits[index : index + 1].clone()
        sampled = alone.choose(alone_written, [1])
        assert int(sampled.token_ids) == int(together.token_ids[index])
        assert torch.equal(alone_written[0], written[index])
        assert entries_of(sampled.logprobs).get(0) == of_together.get(index)


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
        assert entries_of(alone.logprobs)[0] == entries_of(together.logprobs)[row]


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
    all_options = [
        {},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.0, "seed": 3, "top_p": 0.7, "logprobs": 2},
        {"temperature": 0.5, "presence_penalty": 1.0, "min_p": 0.1, "logprobs": 2},
        {"repetition_penalty": 1.5, "logprobs": 2},
    ]
    rig = SamplerRig()
    for row, options in enumerate(all_options):
        rig.enter(row, output=[7, 7], **options)
    logits = random_logits(5)
    clean = rig.choose(logits.clone(), range(5))
    for row, (token, value) in spoiled.items():
        logits[row, token] = value
    sampled = rig.choose(logits, range(5))
    assert sampled.highest.isfinite().tolist() == [False, False, True, False, True]
    for row in (2, 4):
        assert sampled.token_ids[row] == clean.token_ids[row]
        assert entries_of(sampled.logprobs)[row] == entries_of(clean.logprobs)[row]


def test_a_row_with_no_token_left_has_none():
    rig = SamplerRig()
    rig.enter(0, allowed_token_ids=frozenset({2}), min_tokens=1, eos_token_id=2)
    rig.enter(1)
    assert rig.choose(random_logits(2), [0, 1]).highest.isfinite().tolist() == [False, True]


def test_a_row_that_left_takes_nothing_along():
    rig = SamplerRig(max_num_seqs=1)
    logits = random_logits(1)
    for options in SAMPLING_OPTIONS:
        rig.enter(0, **options)
        rig.choose(logits.clone(), [0])
        rig.leave(0)
        rig.enter(0)
        assert torch.equal(rig.changed(logits, [0]), logits)
        assert rig.choose(logits.clone(), [0]).logprobs is None
        rig.leave(0)


@pytest.mark.parametrize("index", range(len(SAMPLING_OPTIONS)))
def test_a_resumed_request_continues_as_if_it_had_never_left(index):
    steps = [random_logits(1, seed=seed) for seed in range(12)]
    prompt, options = [4, 9, 1], SAMPLING_OPTIONS[index]
    whole = SamplerRig()
    whole.enter(0, prompt=prompt, **options)
    tokens = whole.generate(0, steps)
    for cut in (1, 5, 11):
        resumed = SamplerRig()
        resumed.enter(3, prompt=prompt, output=tokens[:cut], **options)
        assert resumed.generate(3, steps[cut:]) == tokens[cut:]


def test_features_change_what_is_sampled_from_in_order():
    def only_four(logits, rows):
        assert rows.tolist() == [1, 0]
        logits.fill_(float("-inf"))
        logits[:, 4] = 0.0

    def then_five(logits, rows):
        logits[1, 5] = 100.0

    rig = SamplerRig(features=(LogitsOfAllRows(only_four), LogitsOfAllRows(then_five)))
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


# behaviours 112 and 114: the order of features, and ends before the minimum, one logit at a time.


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
    assert [rig.banned(row) for row in range(3)] == expected
    rig.append(0, 1)
    assert [rig.banned(row) for row in range(3)] == expected
    rig.append(0, 1)
    assert [rig.banned(row) for row in range(3)] == [[], [8], []]


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


# What is drawn: the distribution of each cut over 100,000 draws, and behaviours 113 and 115.

NUM_DRAWS = 100_000
NUM_SEEDS = 1000
# Exceeded by one of a thousand samples of the right distribution, by degrees of freedom.
CRITICAL = {49: 85.351, 29: 58.301, 20: 45.315, 9: 27.877, 8: 26.124}


def probabilities_of(logits: list[float], *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """By sorting, in float64; no two logits are equal."""
    weights = [math.exp(value / temperature) for value in logits]
    total = sum(weights)
    shares = sorted(((weight / total, token) for token, weight in enumerate(weights)), reverse=True)
    shares = [entry for entry in shares if entry[0] >= min_p * shares[0][0]]
    shares = shares[: top_k or None]
    mass, kept = 0.0, []
    for share, token in shares:
        if mass >= top_p * sum(share for share, _ in shares):
            break
        kept.append((share, token))
        mass += share
    found = [0.0] * len(logits)
    for share, token in kept:
        found[token] = share / mass
    return found


@pytest.mark.parametrize(
    ("options", "num_kept"),
    [
        ({"temperature": 0.7}, 50),
        ({"temperature": 2.0}, 50),
        ({"temperature": 1.0, "top_k": 10}, 10),
        ({"temperature": 1.0, "top_p": 0.75}, 21),
        ({"temperature": 1.0, "min_p": 0.175}, 30),
        ({"temperature": 0.8, "top_k": 20, "top_p": 0.6, "min_p": 0.1}, 9),
    ],
    ids=str,
)
def test_draws_over_seeds_and_positions_follow_the_distribution(options, num_kept):
    # In no order, so that a place in the vocabulary is no place among the likely.
    logits = torch.tensor([-0.06 * (17 * token % VOCAB_SIZE) for token in range(VOCAB_SIZE)])
    expected = torch.tensor(probabilities_of(logits.tolist(), **options), dtype=torch.float64) * NUM_DRAWS
    rig = SamplerRig(max_num_seqs=NUM_SEEDS, max_length=128, ops=ops_for(CPU))
    for row in range(NUM_SEEDS):
        rig.enter(row, seed=row * 0x9E3779B97F4A7C15, **options)
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    for _ in range(NUM_DRAWS // NUM_SEEDS):
        tokens = rig.choose(logits.repeat(NUM_SEEDS, 1), range(NUM_SEEDS)).token_ids
        counts += tokens.bincount(minlength=VOCAB_SIZE)
        rig.lengths += 1
    is_kept = expected > 0.0
    assert int(is_kept.sum()) == num_kept
    assert int(counts[is_kept].sum()) == NUM_DRAWS
    statistic = float(((counts - expected) ** 2 / expected)[is_kept].sum())
    assert statistic < CRITICAL[num_kept - 1]


def test_the_draw_of_a_row_is_a_function_of_seed_and_position_alone():
    rig = SamplerRig()
    options = {"temperature": 1.0, "seed": 77}
    rig.enter(0, prompt=[1, 2, 3], output=[4], **options)
    rig.enter(5, prompt=[9, 9, 9, 9], **options)
    rig.enter(6, prompt=[9, 9, 9, 9], temperature=1.0, seed=78)
    rig.enter(7, prompt=[9, 9, 9], **options)
    steps = [random_logits(1, seed=seed).repeat(4, 1) for seed in range(20)]
    drawn = torch.stack([rig.choose(logits, [0, 5, 6, 7]).token_ids for logits in steps])
    assert torch.equal(drawn[:, 0], drawn[:, 1])
    assert not torch.equal(drawn[:, 0], drawn[:, 2])
    assert not torch.equal(drawn[:, 0], drawn[:, 3])


def test_an_op_gets_columns_that_lie_together_and_no_row_that_does_not_draw():
    seen: list[tuple[torch.Tensor, ...]] = []

    def sample(*columns: torch.Tensor) -> torch.Tensor:
        seen.append(columns)
        return REFERENCE.sample(*columns)

    rig = SamplerRig(ops=replace(REFERENCE, sample=sample))
    for row in range(6):
        rig.enter(row, temperature=float(row % 3), top_k=row, top_p=1 - row / 10, min_p=row / 10, seed=row)
    logits = random_logits(6)
    rig.choose(logits.clone(), [5, 4, 3, 2, 1, 0])
    rig.choose(logits[:2].clone(), [3, 0])
    ((given, temperature, top_k, top_p, min_p, uniforms),) = seen
    assert all(column.is_contiguous() for column in seen[0])
    assert torch.equal(given, logits[[0, 1, 3, 4]])
    assert (temperature.tolist(), top_k.tolist()) == ([2.0, 1.0, 2.0, 1.0], [5, 4, 2, 1])
    assert top_p.tolist() == pytest.approx([0.5, 0.6, 0.8, 0.9])
    assert min_p.tolist() == pytest.approx([0.5, 0.4, 0.2, 0.1])
    assert [column.dtype for column in (temperature, top_p, min_p)] == [torch.float32] * 3
    assert (top_k.dtype, uniforms.dtype) == (torch.int64, torch.float64)


def cut(logits: torch.Tensor, **options: object) -> torch.Tensor:
    """The logits that a row is drawn from, from the logprobs of all the vocabulary."""
    rig = SamplerRig(mode=LogprobsMode.PROCESSED_LOGITS)
    rig.enter(0, temperature=1.0, logprobs=-1, **options)
    sampled = rig.choose(logits.clone(), [0])
    assert sampled.logprobs is not None
    entries_of = sampled.logprobs.by_index()[0]
    row = torch.empty(VOCAB_SIZE)
    row[entries_of.top_token_ids] = torch.tensor(entries_of.top_logprobs)
    return row


def test_113_min_p_leaves_a_dominant_token_alone_and_zero_masks_nothing():
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7] = 10.0
    assert cut(logits, min_p=0.1).isneginf().sum() == VOCAB_SIZE - 1
    assert cut(logits, min_p=0.1)[7] == 10.0
    assert torch.equal(cut(logits, min_p=0.0), logits[0])
    # All that have a tenth of the largest probability, at the border.
    near = torch.full((1, VOCAB_SIZE), -9.0)
    near[0, [1, 2, 3]] = torch.tensor([0.0, math.log(0.1) + 1e-4, math.log(0.1) - 1e-4])
    assert (~cut(near, min_p=0.1).isneginf()).nonzero().flatten().tolist() == [1, 2]


def test_115_disabled_cuts_change_nothing_and_what_was_forbidden_stays_so():
    logits = random_logits(1)
    logits[0, 10:20] = float("-inf")
    for disabled in ({}, {"top_k": 0}, {"top_k": VOCAB_SIZE}, {"top_p": 1.0}):
        assert torch.equal(cut(logits, **disabled), logits[0])
    for options in ({"top_k": 45}, {"top_p": 0.999}, {"min_p": 1e-9}, {"top_k": 3, "top_p": 0.5}):
        assert cut(logits, **options)[10:20].isneginf().all()


@pytest.mark.parametrize("top_k", [1, 7, 40, VOCAB_SIZE])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_115_what_is_kept_equals_the_twin_by_sorting(top_k, top_p):
    logits = random_logits(1, seed=top_k)
    expected = probabilities_of(logits[0].tolist(), top_k=top_k, top_p=top_p)
    assert (~cut(logits, top_k=top_k, top_p=top_p).isneginf()).tolist() == [share > 0.0 for share in expected]


@pytest.mark.parametrize("ops", [REFERENCE, ops_for(CPU)], ids=["reference", "of-this-machine"])
def test_115_equal_and_wholly_forbidden_rows_do_no_harm(ops):
    rig = SamplerRig(ops=ops)
    for row in range(6):
        rig.enter(row, temperature=1.0, top_k=5 * (row % 2), top_p=0.4 + 0.1 * row, min_p=0.1, seed=row)
    logits = torch.zeros(6, VOCAB_SIZE)
    logits[[2, 3]] = float("-inf")
    sampled = rig.choose(logits, range(6))
    assert sampled.highest.isfinite().tolist() == [True, True, False, False, True, True]
    assert ((sampled.token_ids >= 0) & (sampled.token_ids < VOCAB_SIZE)).all()


def test_115_the_ops_of_this_machine_draw_what_the_reference_draws():
    logits = random_logits(200, vocab_size=700)
    tokens = []
    for ops in (REFERENCE, ops_for(CPU)):
        rig = SamplerRig(max_num_seqs=200, vocab_size=700, ops=ops)
        for row in range(200):
            rig.enter(
                row, temperature=0.1 * (row % 15), top_k=(0, 30, 3)[row % 3], top_p=(1.0, 0.8)[row % 2],
                min_p=(0.0, 0.02, 0.0, 0.0, 0.3)[row % 5], seed=row,
            )  # fmt: skip
        tokens.append(rig.choose(logits.clone(), range(200)).token_ids)
    # Sums taken in another order may move the border between two neighbours.
    assert int((tokens[0] != tokens[1]).sum()) <= 1


def test_weights_of_equal_logits_at_the_border_stay_together():
    weights = kept_weights(
        torch.tensor([[1.0, 1.0, 1.0, 0.0]]), torch.tensor([1.0]), torch.tensor([2]), torch.tensor([1.0]),
        torch.tensor([0.0]),
    )  # fmt: skip
    assert (weights > 0.0).tolist() == [[True, True, True, False]]


# behaviour 116: logprobs of sampled tokens.


def by_index(rig: SamplerRig, logits: torch.Tensor, rows: list[int]) -> tuple[list[int], dict]:
    sampled = rig.choose(logits.clone(), rows)
    return sampled.token_ids.tolist(), {} if sampled.logprobs is None else sampled.logprobs.by_index()


def test_116_no_logprobs_are_returned_unless_requested():
    rig = SamplerRig()
    rig.enter(0, prompt_logprobs=3)
    assert rig.choose(random_logits(1), [0]).logprobs is None
    rig.enter(1, logprobs=0)
    _, entries_of = by_index(rig, random_logits(2), [0, 1])
    assert list(entries_of) == [1]


@pytest.mark.parametrize("vocab_size", [2, 129, 5000])
def test_116_entries_are_within_1e_4_of_log_softmax_and_ranked_by_it(vocab_size):
    num_rows = 12
    rig = SamplerRig(vocab_size=vocab_size)
    wanted = [0, 1, 2, -1, 20, 1]
    for row in range(num_rows):
        rig.enter(row, prompt=[0, 1], temperature=row % 2, seed=row, logprobs=wanted[row % 6])
    logits = random_logits(num_rows, vocab_size=vocab_size)
    expected = logits.double().log_softmax(-1)
    tokens, entries_of = by_index(rig, logits, list(range(num_rows)))
    for row in range(num_rows):
        own = expected[row, tokens[row]]
        k = vocab_size if wanted[row % 6] == -1 else min(wanted[row % 6], vocab_size)
        assert entries_of[row].logprobs == [pytest.approx(float(own), abs=1e-4)]
        rounded = logits[row].log_softmax(-1)
        assert entries_of[row].ranks == [int((rounded >= rounded[tokens[row]]).sum())]
        assert entries_of[row].k == k == len(set(entries_of[row].top_token_ids))
        assert entries_of[row].top_logprobs == rounded[entries_of[row].top_token_ids].tolist()
        best = expected[row].topk(k).values.tolist()
        assert entries_of[row].top_logprobs == pytest.approx(best, abs=1e-4)
        assert max(entries_of[row].top_logprobs, default=0.0) <= 0.0


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
    _, entries_of = by_index(rig, logits, [0, 1])
    assert entries_of[0].k == 5
    assert entries_of[0].top_token_ids == [*logits[0].topk(2).indices.tolist(), 40, 3, 40]
    assert entries_of[0].top_logprobs[2:] == expected[0, [40, 3, 40]].tolist()
    assert (entries_of[1].k, entries_of[1].top_token_ids) == (1, [7])


def test_116_raw_is_before_every_change_and_processed_is_what_was_drawn_from():
    options = {
        "temperature": 0.5, "top_k": 4, "logprobs": -1, "logit_bias": ((3, 9.0),), "repetition_penalty": 1.5,
        "bad_words": ((8,),),
    }  # fmt: skip
    logits = random_logits(1)
    logits[0, 8] = 30.0
    rows = {}
    for mode in LogprobsMode:
        rig = SamplerRig(mode=mode)
        rig.enter(0, prompt=[3, 4], **options)
        tokens, entries_of = by_index(rig, logits, [0])
        rows[mode] = torch.empty(VOCAB_SIZE)
        rows[mode][entries_of[0].top_token_ids] = torch.tensor(entries_of[0].top_logprobs)
        assert entries_of[0].logprobs[0] == rows[mode][tokens[0]]
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
    _, entries_of = by_index(rig, logits.clone(), [0])
    found = torch.empty(VOCAB_SIZE)
    found[entries_of[0].top_token_ids] = torch.tensor(entries_of[0].top_logprobs)
    expected = logits[0] / 0.5
    if cut and cut.get("top_k") != 40:
        expected[2:] = float("-inf")
    assert torch.equal(found, expected)
