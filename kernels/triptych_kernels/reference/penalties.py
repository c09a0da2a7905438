"""Penalties of tokens that a row has seen, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.ops import Penalised


def penalise(logits: Tensor, token_ids: Tensor, penalised: Penalised, lengths: Tensor) -> None:
    """Change, in place, the logits of tokens that rows have seen; all others stay as they are.

    The first lengths[p] of token_ids[rows[p]] were seen. A logit is divided by repetition if it is above 0,
    else multiplied. Then frequency is subtracted for each occurrence of the token after the prompt, and
    presence once if there is any.
    logits: [N, V] fp32, rows contiguous.  token_ids: [R, L] int32, rows contiguous, in the
    vocabulary; in prompts also -1, which is skipped.
    lengths: [P] int64.
    """
    columns = zip(
        penalised.logit_rows.tolist(),
        penalised.rows.tolist(),
        penalised.num_prompt_tokens.tolist(),
        lengths.tolist(),
        penalised.amounts.T,
        strict=True,
    )
    for logit_row, row, num_prompt_tokens, length, (presence, frequency, repetition) in columns:
        seen = token_ids[row, :length].long()
        counts = torch.bincount(seen[num_prompt_tokens:], minlength=logits.shape[1])
        ids = seen[seen >= 0].unique()
        values, counts = logits[logit_row, ids], counts[ids]
        values = torch.where(values > 0.0, values / repetition, values * repetition)
        values = values - frequency * counts
        logits[logit_row, ids] = values - presence * (counts > 0)
