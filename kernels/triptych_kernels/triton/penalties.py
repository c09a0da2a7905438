"""Penalties of tokens that a row has seen, as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.ops import Penalised

_TOKENS_PER_TILE = 1024
# Rows are processed in groups whose counts take at most 64 MiB.
_MAX_COUNTS = 1 << 24


# No specialization on numbers of rows, which determine the alignment of the columns of one tensor.
@triton.jit(
    do_not_specialize=["num_rows", "first"],
    do_not_specialize_on_alignment=["logit_rows_ptr", "rows_ptr", "num_prompt_tokens_ptr"],
)
def _penalise_kernel(
    logits_ptr,
    token_ids_ptr,
    logit_rows_ptr,
    rows_ptr,
    num_prompt_tokens_ptr,
    lengths_ptr,
    amounts_ptr,
    counts_ptr,
    logits_stride,
    token_stride,
    num_rows,
    first,
    vocab_size,
    BLOCK_L: tl.constexpr,
):
    """One row. counts_ptr: [rows of this launch, vocab_size] int32, zero before and afterwards."""
    counts = counts_ptr + tl.program_id(0).to(tl.int64) * vocab_size
    index = first + tl.program_id(0)
    length, prompt = tl.load(lengths_ptr + index), tl.load(num_prompt_tokens_ptr + index)
    presence, frequency = tl.load(amounts_ptr + index), tl.load(amounts_ptr + num_rows + index)
    repetition = tl.load(amounts_ptr + 2 * num_rows + index)
    logits = logits_ptr + tl.load(logit_rows_ptr + index) * logits_stride
    seen = token_ids_ptr + tl.load(rows_ptr + index) * token_stride
    for start in range(0, length, BLOCK_L):
        position = start + tl.arange(0, BLOCK_L)
        is_output = (position < length) & (position >= prompt)
        token = tl.load(seen + position, mask=is_output, other=0)
        tl.atomic_add(counts + token, 1, mask=is_output)
    tl.debug_barrier()
    for start in range(0, length, BLOCK_L):
        position = start + tl.arange(0, BLOCK_L)
        token = tl.load(seen + position, mask=position < length, other=-1)
        # The first program to reach a token changes its logit; the others find a count below 0.
        count = tl.atomic_xchg(counts + token, -1, mask=token >= 0)
        is_first = (token >= 0) & (count >= 0)
        value = tl.load(logits + token, mask=is_first, other=0.0)
        value = tl.where(value > 0.0, tl.math.div_rn(value, repetition), value * repetition)
        value = value - frequency * count.to(tl.float32)
        value = value - tl.where(count > 0, presence, 0.0)
        tl.store(logits + token, value, mask=is_first)
    tl.debug_barrier()
    for start in range(0, length, BLOCK_L):
        position = start + tl.arange(0, BLOCK_L)
        token = tl.load(seen + position, mask=position < length, other=-1)
        tl.store(counts + token, 0, mask=token >= 0)


def penalise(
    logits: Tensor,
    token_ids: Tensor,
    penalised: Penalised,
    lengths: Tensor,
    *,
    max_counts: int = _MAX_COUNTS,
) -> None:
    """Change, in place, the logits of tokens that rows have seen; all others stay as they are.

    The first lengths[p] of token_ids[rows[p]] were seen. A logit is divided by repetition if it is above 0,
    else multiplied. Then frequency is subtracted for each occurrence of the token after the prompt, and
    presence once if there is any.
    logits: [N, V] fp32, rows contiguous.  token_ids: [R, L] int32, rows contiguous, in the
    vocabulary; in prompts also -1, which is skipped.
    lengths: [P] int64.  max_counts: counts that are kept at once, but those of one row at least.
    """
    num_rows, vocab_size = lengths.shape[0], logits.shape[1]
    if logits.stride(1) != 1 or token_ids.stride(1) != 1:
        raise ValueError(
            f"columns must be contiguous; their strides are {logits.stride(1)}, {token_ids.stride(1)}"
        )
    if num_rows == 0:
        return
    at_once = min(num_rows, max(1, max_counts // vocab_size))
    counts = torch.zeros(at_once, vocab_size, dtype=torch.int32, device=logits.device)
    for first in range(0, num_rows, at_once):
        _penalise_kernel[(min(at_once, num_rows - first),)](
            logits,
            token_ids,
            penalised.logit_rows,
            penalised.rows,
            penalised.num_prompt_tokens,
            lengths,
            penalised.amounts,
            counts,
            logits.stride(0),
            token_ids.stride(0),
            num_rows,
            first,
            vocab_size,
            BLOCK_L=_TOKENS_PER_TILE,
        )
