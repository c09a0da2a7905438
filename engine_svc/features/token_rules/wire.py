"""Reads the allowed ids, the bad words and the bias of an ADD."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.features.token_rules.extras import TokenRules
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.field_checks import to_token_ids

_NONE = TokenRules()


def make(config: EngineConfig) -> WireFeature:
    return TokenRulesOfAdd()


class TokenRulesOfAdd(WireFeature):
    """The frontend tokenizes bad words, which come beside the sampling parameters."""

    fields = ("sampling.allowed_token_ids", "sampling.logit_bias", "bad_words")

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        sampling = entry.sampling
        rules = TokenRules(
            frozenset(sampling.allowed_token_ids) or None,
            _to_bias(sampling.logit_bias),
            _to_bad_words(entry.bad_words, context.facts.vocab_size),
        )
        return None if rules == _NONE else Parsed(rules)


def _to_bias(entries: Sequence[sampling_pb2.LogitBias]) -> tuple[tuple[int, float], ...]:
    total: dict[int, float] = {}
    for entry in entries:
        total[entry.token_id] = total.get(entry.token_id, 0.0) + entry.bias
    return tuple(total.items())


def _to_bad_words(sequences: Sequence[add_pb2.TokenSequence], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(to_token_ids(word.token_ids, "bad_words", vocab_size)) for word in sequences)
