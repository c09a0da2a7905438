"""Choosing tokens in Triton against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton.fresh_memory import with_nan_memory
from triptych_kernels import REFERENCE, uniform_noise
from triptych_kernels.triton.sampling import greedy, greedy_linear, sample

SHAPES = [(1, 1), (17, 2), (3, 63), (2, 129), (4, 1500), (2, 9000)]
# (temperature, top-k, top-p, min-p)
SAMPLING_OPTIONS = [
    (1.0, 0, 1.0, 0.0),
    (0.3, 5, 1.0, 0.0),
    (2.0, 0, 0.6, 0.0),
    (0.8, 40, 0.9, 0.0),
    (1.0, 5000, 0.999, 0.0),
    (1.5, 30, 0.8, 0.02),
    (1.0, 0, 1.0, 1.0),
    (1e-30, 7, 0.5, 0.0),
]


def noise(shape, device) -> Tensor:
    generator = torch.Generator().manual_seed(shape[1])
    return (torch.randn(shape, generator=generator) * 3).to(device)


def uniforms_of(num_rows: int, device, *, seed: int = 7) -> Tensor:
    return uniform_noise(torch.full((num_rows,), seed), torch.arange(num_rows), 0).to(device)


def columns_of(options, device) -> list[Tensor]:
    dtypes = (torch.float32, torch.int64, torch.float32, torch.float32)
    return [
        torch.tensor(column, dtype=dtype, device=device)
        for column, dtype in zip(zip(*options, strict=True), dtypes, strict=True)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_linear_equals_the_reference(shape, device):
    num_rows, vocab_size = shape
    linear = REFERENCE.pack_linear(noise((vocab_size, 9), device))
    x, kept = noise((num_rows, 9), device), torch.arange(0, num_rows, 2, device=device)
    found = greedy_linear(linear, x, kept)
    for output, expected in zip(found, REFERENCE.greedy_linear(linear, x, kept), strict=True):
        assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_equals_the_reference(shape, dtype, device):
    logits = noise(shape, device).to(dtype)
    highest, tokens = with_nan_memory(greedy, logits)
    expected_highest, expected_tokens = REFERENCE.greedy(logits)
    assert torch.equal(highest, expected_highest)
    assert torch.equal(tokens, expected_tokens)
    assert (highest.dtype, tokens.dtype) == (torch.float32, torch.int64)


def test_of_equal_logits_the_first_is_chosen_in_every_part_of_a_row(device):
    logits = torch.zeros(3, 9000, device=device)
    logits[0, [77, 78, 5000, 8999]] = 1.0
    logits[1, [4096, 8192]] = 1.0
    assert greedy(logits)[1].tolist() == [77, 4096, 0]


@pytest.mark.parametrize("vocab_size", [100, 9000])
def test_nan_anywhere_in_a_row_shows_and_reaches_no_other(vocab_size, device):
    logits = noise((4, vocab_size), device)
    logits[0, 0] = logits[2, vocab_size - 1] = float("nan")
    logits[3] = float("nan")
    highest, tokens = greedy(logits)
    assert highest.isnan().tolist() == [True, False, True, True]
    assert int(tokens[1]) == int(logits[1].argmax())
    assert ((tokens >= 0) & (tokens < vocab_size)).all()


def test_a_row_without_allowed_tokens_is_not_finite(device):
    highest, tokens = greedy(torch.full((1, 5000), float("-inf"), device=device))
    assert highest.tolist() == [float("-inf")]
    assert tokens.tolist() == [0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sample_equals_the_reference(shape, device):
    num_rows = max(shape[0], len(SAMPLING_OPTIONS))
    logits = noise((num_rows, shape[1]), device)
    columns = columns_of([SAMPLING_OPTIONS[row % len(SAMPLING_OPTIONS)] for row in range(num_rows)], device)
    uniforms = uniforms_of(num_rows, device)
    tokens = with_nan_memory(sample, logits, *columns, uniforms)
    assert torch.equal(tokens, REFERENCE.sample(logits, *columns, uniforms))


def test_drawn_tokens_are_those_of_the_reference_but_for_borders(device):
    logits = noise((12, 128), device)
    columns = columns_of([SAMPLING_OPTIONS[5]] * 12, device)
    uniforms = uniforms_of(12, device)
    tokens, expected = sample(logits, *columns, uniforms), REFERENCE.sample(logits, *columns, uniforms)
    assert (tokens == expected).sum() >= 11


def test_drawn_tokens_follow_the_kept_part_of_the_softmax(device):
    probabilities = torch.tensor([0.4, 0.15, 0.0, 0.05, 0.2, 0.2], device=device)
    num_rows = 20
    logits = probabilities.log().clamp(min=-1e30).expand(num_rows, -1).contiguous()
    columns = columns_of([(1.0, 4, 1.0, 0.0)] * num_rows, device)
    # One in the middle of each twentieth.
    uniforms = (torch.arange(num_rows, dtype=torch.float64, device=device) + 0.5) / num_rows
    tokens = sample(logits, *columns, uniforms)
    counts = torch.bincount(tokens, minlength=6)
    assert counts[2] == 0 and counts[3] == 0
    kept = [0, 1, 4, 5]
    expected = probabilities[kept] / 0.95 * num_rows
    assert ((counts[kept] - expected).abs() < 1.0).all()


def test_equals_of_the_smallest_kept_stay_in(device):
    logits = torch.zeros(16, 300, device=device)
    logits[:, 100:200] = 1.0
    columns = columns_of([(1.0, 10, 1.0, 0.0), (1.0, 0, 0.1, 0.0)] * 8, device)
    tokens = sample(logits, *columns, torch.linspace(0.0, 1.0 - 2.0**-52, 16, dtype=torch.float64).to(device))
    assert int(tokens.min()) == 100
    assert int(tokens.max()) == 199


def test_masked_tokens_are_never_drawn_at_either_end_of_the_noise(device):
    logits = noise((2, 5000), device)
    logits[:, :100] = float("-inf")
    logits[:, 4990:] = float("-inf")
    uniforms = torch.tensor([0.0, 1.0 - 2.0**-52], dtype=torch.float64, device=device)
    assert sample(logits, *columns_of([SAMPLING_OPTIONS[0]] * 2, device), uniforms).tolist() == [100, 4989]


def test_rows_may_lie_apart_with_nan_between_them(device):
    logits = noise((3, 130), device)
    room = torch.full((3, 150), float("nan"), device=device)
    room[:, 10:140] = logits
    columns, uniforms = columns_of(SAMPLING_OPTIONS[3:6], device), uniforms_of(3, device)
    assert torch.equal(sample(room[:, 10:140], *columns, uniforms), sample(logits, *columns, uniforms))
    assert torch.equal(greedy(room[:, 10:140])[1], greedy(logits)[1])


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_a_row_without_a_finite_maximum_gets_some_token_and_spoils_no_other(device):
    logits = noise((4, 200), device)
    columns, uniforms = columns_of([SAMPLING_OPTIONS[5]] * 4, device), uniforms_of(4, device)
    expected = sample(logits, *columns, uniforms)
    logits[0], logits[1, 7], logits[2] = float("nan"), float("inf"), float("-inf")
    tokens = sample(logits, *columns, uniforms)
    assert ((tokens >= 0) & (tokens < 200)).all()
    assert tokens[3] == expected[3]


def test_an_empty_batch_gives_no_tokens(device):
    logits = torch.zeros(0, 10, device=device)
    columns = [column[:0] for column in columns_of(SAMPLING_OPTIONS[:1], device)]
    assert sample(logits, *columns, uniforms_of(0, device)).shape == (0,)
    highest, tokens = greedy(logits)
    assert highest.shape == tokens.shape == (0,)


def test_columns_of_other_rows_are_refused(device):
    logits = noise((2, 10), device)
    with pytest.raises(ValueError, match=r"2 rows have a column of shape \(1,\)"):
        sample(logits, *columns_of(SAMPLING_OPTIONS[:1], device), uniforms_of(2, device))
    with pytest.raises(ValueError, match="not rows of tokens"):
        greedy(logits.t().contiguous().t())
