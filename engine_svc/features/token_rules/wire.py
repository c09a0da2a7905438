"""Reads the allowed ids, the bad words and the bias of an ADD."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.features.token_rules.extras import TokenRules
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.field_checks import check, check_token_ids, to_token_ids

_MAX_LOGIT_BIASES = 300
_MAX_BIAS = 100.0
_MAX_BAD_WORDS = 1024
_MAX_BAD_WORD_IDS = 64
_NONE = TokenRules()


def make(config: EngineConfig) -> WireFeature:
    return TokenRulesOfAdd()


class TokenRulesOfAdd(WireFeature):
    """The frontend tokenizes bad words, which come beside the sampling parameters."""

    fields = ("sampling.allowed_token_ids", "sampling.logit_bias", "bad_words")

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        sampling, vocab_size = entry.sampling, context.facts.vocab_size
        check_token_ids(sampling.allowed_token_ids, "allowed_token_ids", vocab_size, vocab_size)
        rules = TokenRules(
            frozenset(sampling.allowed_token_ids) or None,
            _to_bias(sampling.logit_bias, vocab_size),
            _to_bad_words(entry.bad_words, vocab_size),
        )
        return None if rules == _NONE else Parsed(rules)


def _to_bias(entries: Sequence[sampling_pb2.LogitBias], vocab_size: int) -> tuple[tuple[int, float], ...]:
    check_token_ids([entry.token_id for entry in entries], "logit_bias", _MAX_LOGIT_BIASES, vocab_size)
    total: dict[int, float] = {}
    for entry in entries:
        check(-_MAX_BIAS <= entry.bias <= _MAX_BIAS, "logit_bias", entry.bias, "-100 to 100")
        total[entry.token_id] = total.get(entry.token_id, 0.0) + entry.bias
    return tuple(total.items())


def _to_bad_words(sequences: Sequence[add_pb2.TokenSequence], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    num_words = len(sequences)
    check(num_words <= _MAX_BAD_WORDS, "bad_words", num_words, f"at most {_MAX_BAD_WORDS} words")
    words = [to_token_ids(word.token_ids, "bad_words", vocab_size) for word in sequences]
    limit = f"1 to {_MAX_BAD_WORD_IDS} ids a word"
    for word in words:
        check(1 <= len(word) <= _MAX_BAD_WORD_IDS, "bad_words", len(word), limit)
    return tuple(tuple(word) for word in words)
