"""Masks of tokens that may be chosen, by the native kernel.

Knows tensors and addresses; the work is in token_mask.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu import _native
from triptych_kernels.reference import REFERENCE


def apply_token_mask(logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """See the reference."""
    (num_logit_rows, vocab_size), (logits_stride, stride) = logits.shape, logits.stride()
    if logits.dtype is not torch.float32 or stride != 1:
        return REFERENCE.apply_token_mask(logits, mask, rows)
    num_rows = num_logit_rows if rows is None else rows.shape[0]
    num_words = -(-vocab_size // 32)
    if mask.shape != (num_rows, num_words) or mask.dtype is not torch.int32 or mask.stride(1) != 1:
        raise ValueError(
            f"the mask of {num_rows} rows for {vocab_size} tokens is {mask.dtype} {tuple(mask.shape)}"
        )
    if rows is not None and (rows.dtype is not torch.int64 or not rows.is_contiguous()):
        raise ValueError(f"rows are {rows.dtype}, contiguous int64 is needed")
    if num_rows and vocab_size:
        _native.apply_token_mask(
            logits.data_ptr(),
            mask.data_ptr(),
            0 if rows is None else rows.data_ptr(),
            num_rows,
            logits_stride,
            mask.stride(0),
            vocab_size,
            num_logit_rows,
        )
    return None
