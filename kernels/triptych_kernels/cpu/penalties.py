"""Penalties of seen tokens by the native kernel.

Knows tensors and addresses; the arithmetic is in penalties.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.cpu import _native
from triptych_kernels.ops import Penalised
from triptych_kernels.reference import REFERENCE


def penalise(logits: Tensor, token_ids: Tensor, penalised: Penalised, lengths: Tensor) -> None:
    """See the reference. Ids outside of the vocabulary are skipped."""
    (num_rows, vocab_size), (logits_stride, stride) = logits.shape, logits.stride()
    (num_token_rows, max_length), (token_stride, token_last) = token_ids.shape, token_ids.stride()
    if (
        logits.dtype is not torch.float32
        or stride != 1
        or token_ids.dtype is not torch.int32
        or token_last != 1
    ):
        return REFERENCE.penalise(logits, token_ids, penalised, lengths)
    count = penalised.rows.shape[0]
    if lengths.shape != (count,) or lengths.dtype is not torch.int64 or not lengths.is_contiguous():
        raise ValueError(f"{count} rows have {lengths.dtype} lengths of shape {tuple(lengths.shape)}")
    if count:
        _native.penalise(
            logits.data_ptr(),
            token_ids.data_ptr(),
            penalised.logit_rows.data_ptr(),
            penalised.rows.data_ptr(),
            lengths.data_ptr(),
            penalised.num_prompt_tokens.data_ptr(),
            penalised.amounts.data_ptr(),
            count,
            logits_stride,
            token_stride,
            vocab_size,
            num_rows,
            num_token_rows,
            max_length,
        )
    return None
