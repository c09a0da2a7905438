"""Masks of tokens that may be chosen, as a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TOKENS_PER_PROGRAM = 4096


@triton.jit
def _apply_token_mask_kernel(
    logits_ptr, mask_ptr, logits_stride, mask_stride, vocab_size, BLOCK_V: tl.constexpr
):
    """BLOCK_V tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token = token < vocab_size
    words = tl.load(mask_ptr + row * mask_stride + token // 32, mask=is_token, other=-1)
    is_forbidden = ((words >> (token % 32)) & 1) == 0
    forbidden = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    tl.store(logits_ptr + row * logits_stride + token, forbidden, mask=is_token & is_forbidden)


def apply_token_mask(logits: Tensor, mask: Tensor) -> None:
    """Set logits of forbidden tokens to -inf, in place.

    logits: [N, V] fp32, rows contiguous, written.  mask: [N, ceil(V / 32)] int32, rows contiguous; bit v % 32
    of word v // 32 is 1 where v is allowed.
    """
    num_rows, vocab_size = logits.shape
    if mask.shape != (num_rows, -(-vocab_size // 32)):
        raise ValueError(f"logits are {tuple(logits.shape)}, the mask has {tuple(mask.shape)} words")
    if logits.stride(1) != 1 or mask.stride(1) != 1:
        raise ValueError(
            f"columns must be contiguous; their strides are {logits.stride(1)}, {mask.stride(1)}"
        )
    if logits.numel() == 0:
        return
    block = min(_TOKENS_PER_PROGRAM, triton.next_power_of_2(vocab_size))
    grid = (num_rows, triton.cdiv(vocab_size, block))
    _apply_token_mask_kernel[grid](logits, mask, logits.stride(0), mask.stride(0), vocab_size, BLOCK_V=block)
