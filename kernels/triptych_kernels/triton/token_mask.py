"""Masks of tokens that may be chosen, as a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TOKENS_PER_PROGRAM = 4096


@triton.jit
def _apply_token_mask_kernel(
    logits_ptr,
    mask_ptr,
    rows_ptr,
    logits_stride,
    mask_stride,
    num_logit_rows,
    vocab_size,
    HAS_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """BLOCK_V tokens of one row of the mask."""
    row = tl.program_id(0).to(tl.int64)
    if HAS_ROWS:
        logit_row = tl.load(rows_ptr + row)
    else:
        logit_row = row
    token = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token = (token < vocab_size) & (logit_row >= 0) & (logit_row < num_logit_rows)
    words = tl.load(mask_ptr + row * mask_stride + token // 32, mask=is_token, other=-1)
    is_forbidden = ((words >> (token % 32)) & 1) == 0
    forbidden = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    tl.store(logits_ptr + logit_row * logits_stride + token, forbidden, mask=is_token & is_forbidden)


def apply_token_mask(logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """See the reference. Columns are contiguous; rows outside of the logits are skipped."""
    (num_logit_rows, vocab_size), num_rows = logits.shape, mask.shape[0]
    if mask.shape[1] != -(-vocab_size // 32):
        raise ValueError(f"logits are {tuple(logits.shape)}, the mask has {tuple(mask.shape)} words")
    if num_rows != (num_logit_rows if rows is None else rows.shape[0]):
        named = num_logit_rows if rows is None else rows.shape[0]
        raise ValueError(f"the mask has {num_rows} rows for {named} rows of logits")
    if logits.stride(1) != 1 or mask.stride(1) != 1 or (rows is not None and not rows.is_contiguous()):
        raise ValueError(
            f"columns must be contiguous; their strides are {logits.stride(1)}, {mask.stride(1)}"
        )
    if num_rows == 0 or vocab_size == 0:
        return
    block = min(_TOKENS_PER_PROGRAM, triton.next_power_of_2(vocab_size))
    grid = (num_rows, triton.cdiv(vocab_size, block))
    _apply_token_mask_kernel[grid](
        logits,
        mask,
        mask if rows is None else rows,
        logits.stride(0),
        mask.stride(0),
        num_logit_rows,
        vocab_size,
        HAS_ROWS=rows is not None,
        BLOCK_V=block,
    )
