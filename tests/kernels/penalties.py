"""Rows that ask for penalties, of any size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych_kernels import Penalised


@dataclass
class PenaltyCase:
    """What `penalise` is called with."""

    logits: Tensor
    token_ids: Tensor
    penalised: Penalised
    lengths: Tensor


def penalty_case(
    num_rows: int, vocab_size: int, num_asking: int, max_length: int, device: torch.device | None = None
) -> PenaltyCase:
    """Logits within wider memory, rows in any order, tokens of which many come again."""
    generator = torch.Generator().manual_seed(vocab_size + max_length)
    wide = torch.randn(num_rows, vocab_size + 7, generator=generator) * 3
    lengths = torch.randint(1, max_length + 1, (num_asking,), generator=generator)
    if num_asking:
        lengths[-1] = max_length
    common = max(1, vocab_size // 8)
    token_ids = torch.randint(common, (num_rows + 2, max_length + 3), generator=generator).int()
    token_ids[:, ::3] = torch.randint(vocab_size, token_ids[:, ::3].shape, generator=generator).int()
    amounts = torch.rand(3, num_asking, generator=generator) + torch.tensor([[-0.5], [-0.5], [0.6]])
    # Some ask for one kind alone.
    amounts[:2, ::3] = 0.0
    amounts[2, 1::3] = 1.0
    penalised = Penalised(
        logit_rows=torch.randperm(num_rows, generator=generator)[:num_asking].to(device),
        rows=torch.randperm(num_rows + 2, generator=generator)[:num_asking].to(device),
        num_prompt_tokens=(lengths // 3).to(device),
        amounts=amounts.to(device),
    )
    return PenaltyCase(
        wide.to(device)[:, 5 : vocab_size + 5], token_ids.to(device), penalised, lengths.to(device)
    )


def without_tokens(case: PenaltyCase) -> None:
    """Leave the prompts no token, as those have that are embeddings."""
    for row, num_prompt_tokens in zip(case.penalised.rows, case.penalised.num_prompt_tokens, strict=True):
        case.token_ids[row, :num_prompt_tokens] = -1
