"""Greedy answers beside transformers, which is given each token of the answer up to there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Where fp32 logits are closer than this, the order of sums decides.
TIE = 1e-4


class Difference(NamedTuple):
    """A token of an answer that is not the most likely one, and how far its logit is below that one's."""

    position: int
    margin: float


@torch.inference_mode()
def answer_logits(
    model: torch.nn.Module, answers: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[Tensor]:
    """Logits [answer, V] in fp32 at the positions whose next tokens an answer has.

    answers: prompts and what follows them, which are computed together, padded at the right.
    """
    sequences = [torch.tensor([*prompt, *answer]) for prompt, answer in answers]
    token_ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    logits = model(input_ids=token_ids, use_cache=False).logits
    return [
        rows[len(prompt) - 1 : len(prompt) + len(answer) - 1].float()
        for rows, (prompt, answer) in zip(logits, answers, strict=True)
    ]


def differences(model: torch.nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> list[Difference]:
    (logits,) = answer_logits(model, [(prompt, answer)])
    return differences_from(logits, answer)


def differences_from(logits: Tensor, answer: Sequence[int]) -> list[Difference]:
    """The tokens of an answer that are not the most likely ones. logits: see `answer_logits`."""
    return [
        Difference(position, float(row.max() - row[token]))
        for position, (row, token) in enumerate(zip(logits, answer, strict=True))
        if int(row.argmax()) != token
    ]
