"""What is drawn: the distribution of each cut over 100,000 draws, and behaviours 113 and 115."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from engine_svc.runner.sampler import LogprobsMode
from tests.engine_svc.runner.sampler_rig import CPU, VOCAB_SIZE, SamplerRig, random_logits
from triptych_kernels import REFERENCE, ops_for
from triptych_kernels.reference.sampling import kept_weights

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
    ("wish", "num_kept"),
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
def test_draws_over_seeds_and_positions_follow_the_distribution(wish, num_kept):
    # In no order, so that a place in the vocabulary is no place among the likely.
    logits = torch.tensor([-0.06 * (17 * token % VOCAB_SIZE) for token in range(VOCAB_SIZE)])
    expected = torch.tensor(probabilities_of(logits.tolist(), **wish), dtype=torch.float64) * NUM_DRAWS
    rig = SamplerRig(max_num_seqs=NUM_SEEDS, max_length=128, ops=ops_for(CPU))
    for row in range(NUM_SEEDS):
        rig.enter(row, seed=row * 0x9E3779B97F4A7C15, **wish)
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
    wish = {"temperature": 1.0, "seed": 77}
    rig.enter(0, prompt=[1, 2, 3], output=[4], **wish)
    rig.enter(5, prompt=[9, 9, 9, 9], **wish)
    rig.enter(6, prompt=[9, 9, 9, 9], temperature=1.0, seed=78)
    rig.enter(7, prompt=[9, 9, 9], **wish)
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


def cut(logits: torch.Tensor, **wish: object) -> torch.Tensor:
    """The logits that a row is drawn from, read off what is told of all the vocabulary."""
    rig = SamplerRig(mode=LogprobsMode.PROCESSED_LOGITS)
    rig.enter(0, temperature=1.0, logprobs=-1, **wish)
    sampled = rig.choose(logits.clone(), [0])
    assert sampled.logprobs is not None
    told = sampled.logprobs.by_index()[0]
    row = torch.empty(VOCAB_SIZE)
    row[told.top_token_ids] = torch.tensor(told.top_logprobs)
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
    for wish in ({"top_k": 45}, {"top_p": 0.999}, {"min_p": 1e-9}, {"top_k": 3, "top_p": 0.5}):
        assert cut(logits, **wish)[10:20].isneginf().all()


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
