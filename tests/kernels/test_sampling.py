"""uniform_noise and sample against their twins, and the distribution they draw from."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.naive import naive_sample, naive_uniform
from triptych_kernels import uniform_noise
from triptych_kernels.reference.sampling import kept_weights, sample


def signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def uniforms_of(num: int, *, seed: int = 7) -> torch.Tensor:
    return uniform_noise(torch.full((num,), seed), torch.arange(num), 0)


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniforms=None):
    num_rows = logits.shape[0]
    return sample(
        logits.float(),
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_k, dtype=torch.int64),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
        uniforms if uniforms is not None else uniforms_of(num_rows),
    )


def test_noise_is_splitmix64_of_seed_position_and_draw():
    seeds = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 123456789012345678]
    positions = [0, 5, 131071, 1, 77, 2**40]
    for number in (0, 1, 9):
        noise = uniform_noise(torch.tensor([signed(seed) for seed in seeds]), torch.tensor(positions), number)
        expected = [
            naive_uniform(seed, position, number) for seed, position in zip(seeds, positions, strict=True)
        ]
        assert noise.tolist() == expected


def test_noise_is_spread_evenly_over_positions_seeds_and_draws():
    num = 20_000
    by_position = uniform_noise(torch.full((num,), 3), torch.arange(num), 0)
    by_seed = uniform_noise(torch.arange(num), torch.full((num,), 3), 0)
    by_draw = uniform_noise(torch.arange(num), torch.full((num,), 3), 1)
    for noise in (by_position, by_seed, by_draw):
        counts = torch.histc(noise.float(), bins=20, min=0.0, max=1.0)
        chi_square = ((counts - num / 20) ** 2 / (num / 20)).sum()
        assert chi_square < 43.8  # 0.1 % of true uniforms exceed it at 19 degrees of freedom
    assert torch.corrcoef(torch.stack([by_position, by_seed, by_draw])).fill_diagonal_(0.0).abs().max() < 0.03


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 129, 1500])
@pytest.mark.parametrize(
    "options",
    [
        (1.0, 0, 1.0, 0.0),
        (0.3, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (2.0, 0, 0.6, 0.0),
        (0.8, 40, 0.9, 0.0),
        (1.0, 5000, 0.999, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.5, 30, 0.8, 0.02),
        (1.0, 0, 1.0, 1.0),
    ],
    ids=str,
)
def test_tokens_equal_the_twin(vocab_size, options):
    logits = torch.randn(33, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    uniforms = uniforms_of(33, seed=vocab_size)
    tokens = draw(logits, *options, uniforms=uniforms)
    expected = [
        naive_sample(row, *options, uniform)
        for row, uniform in zip(logits.tolist(), uniforms.tolist(), strict=True)
    ]
    assert tokens.tolist() == expected


def test_a_flat_nucleus_is_as_wide_as_it_has_to_be():
    logits = torch.zeros(1, 4000)
    logits[0, :2000] = 1.0
    tokens = draw(logits.expand(500, -1).contiguous(), top_p=0.7, uniforms=uniforms_of(500))
    assert int(tokens.max()) < 2000
    assert int(tokens.max()) > 1500


def test_masked_tokens_are_never_drawn_at_either_end_of_the_noise():
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(3))
    logits[:, :100] = float("-inf")
    logits[:, 990:] = float("-inf")
    tokens = draw(logits, uniforms=torch.tensor([0.0, 1.0 - 2.0**-52], dtype=torch.float64))
    assert tokens.tolist() == [100, 989]


def test_a_tiny_temperature_is_greedy():
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(4))
    assert draw(logits, temperature=1e-30).tolist() == logits.argmax(-1).tolist()


def test_weights_of_a_row_are_bitwise_those_in_company():
    logits = torch.randn(64, 33_000, generator=torch.Generator().manual_seed(5)) * 4
    columns = [
        torch.linspace(0.5, 1.5, 64), torch.arange(64) * 3, torch.linspace(0.3, 1.0, 64),
        torch.linspace(0.0, 1e-3, 64),
    ]  # fmt: skip
    together = kept_weights(logits, *columns)
    for row in (0, 1, 40, 63):
        alone = kept_weights(logits[row : row + 1], *(column[row : row + 1] for column in columns))
        assert torch.equal(alone[0], together[row])


def test_an_empty_batch_gives_no_tokens():
    assert draw(torch.zeros(0, 10)).shape == (0,)
