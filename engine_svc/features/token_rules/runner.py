"""Excludes or favours tokens of rows: allowed ids, bans, bad words, bias."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.core.step import AdmittedRequest
from engine_svc.features.token_rules.bad_words import BadWords
from engine_svc.features.token_rules.extras import TokenRules
from engine_svc.runner.feature import LogitRows, RunnerContext, RunnerFeature
from engine_svc.runner.sampling.row_tokens import RowTokens
from engine_svc.runner.sampling.transfer import Ints

_FORBIDDEN = float("-inf")


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature:
    return TokenRuleRows(context.vocab_size, context.device)


class TokenRuleRows(RunnerFeature):
    """The rules of all rows; a rule that no row has costs one check of an empty dictionary."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._allowed = RowTokens(vocab_size, device)
        self._banned = RowTokens(vocab_size, device)
        self._bias = RowTokens(vocab_size, device)
        self._bad_words = BadWords(vocab_size, device)

    def uses(self, admitted: AdmittedRequest) -> bool:
        return TokenRules in admitted.extras

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        rules: TokenRules = admitted.extras[TokenRules]
        if rules.allowed is not None:
            self._allowed.put(row, sorted(rules.allowed))
        if rules.bias:
            ids, amounts = zip(*rules.bias, strict=True)
            self._bias.put(row, ids, amounts)
        banned = {word[0] for word in rules.bad_words if len(word) == 1}
        if banned:
            self._banned.put(row, sorted(banned))
        words = [word for word in rules.bad_words if len(word) > 1]
        self._bad_words.put(row, words, admitted.num_prompt_tokens)

    def remove_row(self, row: int) -> None:
        for rule in (self._allowed, self._banned, self._bias, self._bad_words):
            rule.drop(row)

    def apply(self, logits: Tensor, logit_rows: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        flat = logits.view(-1)
        if (allowed := self._allowed.logit_positions(logit_rows)) is not None:
            kept = flat[allowed.flat]
            logits.index_fill_(0, allowed.rows, _FORBIDDEN)
            flat[allowed.flat] = kept
        if (banned := self._banned.logit_positions(logit_rows)) is not None:
            flat.index_fill_(0, banned.flat, _FORBIDDEN)
        self._bad_words.apply(logits, logit_rows, positions, token_ids)
        if (favoured := self._bias.logit_positions(logit_rows)) is not None:
            flat.index_add_(0, favoured.flat, favoured.amounts)
