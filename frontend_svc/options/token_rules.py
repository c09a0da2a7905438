"""Token rules: amounts added to single logits, the only tokens allowed, and words that may not occur."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from frontend_svc.text.limits import Violations
from frontend_svc.text.tokenize.id_column import id_column
from triptych.engine.v1 import add_pb2
from triptych_kit.rules import rules_of

_BAD_WORDS = "sampling.bad_words"
_MAX_SEQUENCES = rules_of(add_pb2.AddEntry, "bad_words").max_items
_MAX_SEQUENCE_IDS = rules_of(add_pb2.TokenSequence, "token_ids").max_items
_BEFORE = "a"


class TokenRules(RequestOption):
    fields = (_BAD_WORDS, "sampling.logit_bias", "sampling.allowed_token_ids")

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        sampling = request.sampling
        entry.sampling.logit_bias.extend(sampling.logit_bias)
        entry.sampling.allowed_token_ids.extend(dict.fromkeys(sampling.allowed_token_ids))
        if sampling.bad_words:
            for token_ids in await bad_word_sequences(sampling.bad_words, prompt.model.tokenizer):
                entry.bad_words.add(token_ids=id_column(token_ids))


class WordTokenizer(Protocol):
    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


async def bad_word_sequences(words: Sequence[str], tokenizer: WordTokenizer) -> list[list[int]]:
    """Token sequences that the engine forbids: the last id may not follow the others. Without duplicates.

    A word has two forms: at the start of a text, and with a preceding space, for which most vocabularies
    have separate tokens. The second is left out if it ends with the first, which forbids it already. A word
    that begins with white space has only the form in which it goes on a text.

    Raises InvalidArgument with a violation for each word that has no tokens or too many.
    """
    violations = Violations()
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        goes_on = word[:1].isspace()
        plain = await (_following if goes_on else _encoded)(word, tokenizer)
        violations.need_count(_BAD_WORDS, len(plain), "tokens", 1, _MAX_SEQUENCE_IDS, index=index)
        if not 1 <= len(plain) <= _MAX_SEQUENCE_IDS:
            continue
        sequences[tuple(plain)] = None
        spaced = plain if goes_on else await _encoded(f" {word}", tokenizer)
        if spaced[-len(plain) :] != plain and 1 <= len(spaced) <= _MAX_SEQUENCE_IDS:
            sequences[tuple(spaced)] = None
    violations.need_count(_BAD_WORDS, len(sequences), "token sequences", 0, _MAX_SEQUENCES)
    violations.raise_if_any()
    return [list(sequence) for sequence in sequences]


async def _encoded(text: str, tokenizer: WordTokenizer) -> list[int]:
    return await tokenizer.encode(text, add_special_tokens=False)


async def _following(text: str, tokenizer: WordTokenizer) -> list[int]:
    """The tokens of `text` behind other text: some tokenizers begin every text with a space of their own."""
    before, both = await _encoded(_BEFORE, tokenizer), await _encoded(_BEFORE + text, tokenizer)
    is_apart = both[: len(before)] == before
    return both[len(before) :] if is_apart else await _encoded(text, tokenizer)
