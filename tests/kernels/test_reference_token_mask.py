"""The reference of token masks against one bit at a time."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels import REFERENCE


def packed(allowed: list[set[int]], vocab_size: int) -> torch.Tensor:
    """Masks in which exactly these tokens are allowed."""
    rows = []
    for tokens in allowed:
        words = [0] * -(-vocab_size // 32)
        for token in tokens:
            words[token // 32] |= 1 << (token % 32)
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 63, 64, 129])
def test_exactly_the_allowed_tokens_keep_their_logits(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size, generator=generator)
    allowed = [
        set(),
        set(range(vocab_size)),
        {vocab_size - 1},
        set(torch.randperm(vocab_size, generator=generator)[: vocab_size // 2].tolist()),
    ]
    before = logits.clone()
    REFERENCE.apply_token_mask(logits, packed(allowed, vocab_size))
    for row, tokens in enumerate(allowed):
        for token in range(vocab_size):
            expected = float(before[row, token]) if token in tokens else float("-inf")
            assert float(logits[row, token]) == expected


def test_the_sign_bit_of_a_word_is_a_token_too():
    logits = torch.zeros(1, 64)
    REFERENCE.apply_token_mask(logits, torch.tensor([[-(2**31), 0]], dtype=torch.int32))
    assert logits.isfinite().nonzero().tolist() == [[0, 31]]
