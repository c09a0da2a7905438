"""Native masks of tokens: the reference's bits, and nothing written beside the rows that are named."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels import REFERENCE


def logits_and_mask(num_rows: int, vocab_size: int, num_masked: int | None = None):
    generator = torch.Generator().manual_seed(vocab_size)
    shape = (num_rows if num_masked is None else num_masked, -(-vocab_size // 32))
    words = torch.randint(-(2**31), 2**31, shape, generator=generator).int()
    words[:, ::3] = 0
    words[:, 1::3] = -1
    return torch.randn(num_rows, vocab_size, generator=generator), words


@pytest.mark.parametrize("shape", [(1, 1), (3, 32), (2, 63), (63, 129), (2, 70_001)], ids=str)
def test_a_mask_of_all_rows_is_the_references(ops, shape):
    logits, mask = logits_and_mask(*shape)
    expected = logits.clone()
    REFERENCE.apply_token_mask(expected, mask)
    ops.apply_token_mask(logits, mask)
    assert torch.equal(logits, expected)


def test_a_mask_of_some_rows_leaves_the_others(ops):
    logits, mask = logits_and_mask(6, 2100, 3)
    before = logits.clone()
    expected = logits.clone()
    rows = torch.tensor([5, 0, 2])
    REFERENCE.apply_token_mask(expected, mask, rows)
    ops.apply_token_mask(logits, mask, rows)
    assert torch.equal(logits, expected)
    assert torch.equal(logits[[1, 3, 4]], before[[1, 3, 4]])
    assert not torch.equal(logits[5], before[5])


def test_rows_may_lie_apart_and_bits_behind_the_vocabulary_mean_nothing(ops):
    logits, mask = logits_and_mask(5, 70)
    room = torch.zeros(5, 90)
    room[:, 10:80] = logits
    words = torch.full((5, 9), -1, dtype=torch.int32)
    words[:, :3] = mask
    REFERENCE.apply_token_mask(logits, mask)
    ops.apply_token_mask(room[:, 10:80], words[:, :3])
    assert torch.equal(room[:, 10:80], logits)
    assert not room[:, :10].any() and not room[:, 80:].any()


def test_what_does_not_fit_is_refused(ops):
    logits, mask = logits_and_mask(3, 63)
    with pytest.raises(ValueError, match="the mask of 3 rows"):
        ops.apply_token_mask(logits, mask[:, :1])
    with pytest.raises(ValueError, match="the mask of 2 rows"):
        ops.apply_token_mask(logits, mask, torch.tensor([0, 1]))
    with pytest.raises(IndexError, match="row 3"):
        ops.apply_token_mask(logits, mask, torch.tensor([0, 1, 3]))
