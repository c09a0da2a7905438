"""Excludes or favours tokens of a row: allowed ids, bans, bad words, bias.

End tokens are excluded until `min_tokens`; then the row no longer has that rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine_svc.core.sampling_params import SamplingParams
from engine_svc.runner.sampling.bad_words import BadWords
from engine_svc.runner.sampling.row_tokens import RowTokens
from engine_svc.runner.sampling.transfer import Ints

_FORBIDDEN = float("-inf")


class TokenRules:
    """The rules of all rows; a rule that no row has costs one check of an empty dictionary."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._allowed = RowTokens(vocab_size, device)
        self._banned = RowTokens(vocab_size, device)
        self._bias = RowTokens(vocab_size, device)
        self._bad_words = BadWords(vocab_size, device)
        self._early_ends = RowTokens(vocab_size, device)
        self._min_lengths: dict[int, int] = {}  # of rows in _early_ends

    def enter(self, row: int, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        if sampling.allowed_token_ids is not None:
            self._allowed.put(row, sorted(sampling.allowed_token_ids))
        if sampling.logit_bias:
            ids, amounts = zip(*sampling.logit_bias, strict=True)
            self._bias.put(row, ids, amounts)
        if sampling.bad_words:
            banned = {word[0] for word in sampling.bad_words if len(word) == 1}
            if banned:
                self._banned.put(row, sorted(banned))
            words = [word for word in sampling.bad_words if len(word) > 1]
            self._bad_words.enter(row, words, num_prompt_tokens)
        if sampling.min_tokens and sampling.end_token_ids:
            self._early_ends.put(row, sorted(sampling.end_token_ids))
            self._min_lengths[row] = num_prompt_tokens + sampling.min_tokens

    @staticmethod
    def has_any(sampling: SamplingParams) -> bool:
        return (
            sampling.allowed_token_ids is not None
            or bool(sampling.logit_bias)
            or bool(sampling.bad_words)
            or sampling.min_tokens > 0
        )

    def leave(self, row: int) -> None:
        for rule in (self._allowed, self._banned, self._bias):
            rule.drop(row)
        self._bad_words.leave(row)
        self._release_ends(row)

    def apply(self, logits: Tensor, rows: Ints, positions: Ints, token_ids: Tensor) -> None:
        """Change logits [N, V] fp32, contiguous, in place. token_ids[rows[n], :positions[n]] are known."""
        if (logit_positions := self._allowed.logit_positions(rows)) is not None:
            kept = logits.view(-1)[logit_positions.flat]
            logits.index_fill_(0, logit_positions.rows, _FORBIDDEN)
            logits.view(-1)[logit_positions.flat] = kept
        if (logit_positions := self._banned.logit_positions(rows)) is not None:
            logits.view(-1).index_fill_(0, logit_positions.flat, _FORBIDDEN)
        self._bad_words.apply(logits, rows, positions, token_ids)
        if self._min_lengths:
            self._release_rows_past_min_tokens(rows, positions)
            if (logit_positions := self._early_ends.logit_positions(rows)) is not None:
                logits.view(-1).index_fill_(0, logit_positions.flat, _FORBIDDEN)
        if (logit_positions := self._bias.logit_positions(rows)) is not None:
            logits.view(-1).index_add_(0, logit_positions.flat, logit_positions.amounts)

    def _release_rows_past_min_tokens(self, rows: Ints, positions: Ints) -> None:
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            if position >= self._min_lengths.get(row, position + 1):
                self._release_ends(row)

    def _release_ends(self, row: int) -> None:
        if self._min_lengths.pop(row, None) is not None:
            self._early_ends.drop(row)
