"""Masks of tokens in Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels import REFERENCE
from triptych_kernels.triton.token_mask import apply_token_mask

SHAPES = [(1, 1), (3, 32), (2, 63), (63, 129), (2, 9000)]


def logits_and_mask(shape, device):
    num_rows, vocab_size = shape
    generator = torch.Generator().manual_seed(vocab_size)
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab_size // 32)), generator=generator)
    return torch.randn(shape, generator=generator).to(device), words.int().to(device)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_apply_token_mask_equals_the_reference(shape, device):
    logits, mask = logits_and_mask(shape, device)
    expected = logits.clone()
    REFERENCE.apply_token_mask(expected, mask)
    apply_token_mask(logits, mask)
    assert torch.equal(logits, expected)


def test_the_last_bit_of_a_word_counts_and_words_behind_the_vocabulary_do_not(device):
    mask = torch.tensor([[-(2**31), 0]], dtype=torch.int32, device=device)
    logits = torch.zeros(1, 40, device=device)
    apply_token_mask(logits, mask)
    assert logits.isfinite().nonzero()[:, 1].tolist() == [31]


def test_rows_may_lie_apart_and_nothing_between_them_is_touched(device):
    logits, mask = logits_and_mask((5, 70), device)
    room = torch.zeros(5, 90, device=device)
    room[:, 10:80] = logits
    words = torch.zeros(5, 4, dtype=torch.int32, device=device)
    words[:, :3] = mask
    REFERENCE.apply_token_mask(logits, mask)
    apply_token_mask(room[:, 10:80], words[:, :3])
    assert torch.equal(room[:, 10:80], logits)
    assert not room[:, :10].any() and not room[:, 80:].any()


def test_a_mask_of_some_rows_leaves_the_others(device):
    logits, mask = logits_and_mask((6, 2100), device)
    rows = torch.tensor([5, 0, 2], device=device)
    expected = logits.clone()
    REFERENCE.apply_token_mask(expected, mask[:3], rows)
    apply_token_mask(logits, mask[:3], rows)
    assert torch.equal(logits, expected)


def test_an_empty_batch_changes_nothing(device):
    apply_token_mask(torch.zeros(0, 40, device=device), torch.zeros(0, 2, dtype=torch.int32, device=device))


def test_a_mask_of_another_vocabulary_is_refused(device):
    logits, mask = logits_and_mask((2, 63), device)
    with pytest.raises(ValueError, match="the mask has \\(2, 1\\) words"):
        apply_token_mask(logits, mask[:, :1])
