"""Words that may not appear, as the token sequences an engine can forbid. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from frontend_svc.text.limits import Violations

FIELD = "sampling.bad_words"
MAX_SEQUENCES = 1024
MAX_SEQUENCE_IDS = 64


class WordTokenizer(Protocol):
    """What of a model's tokenizer is needed here."""

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`."""
        ...


async def bad_word_sequences(words: Sequence[str], tokenizer: WordTokenizer) -> list[list[int]]:
    """The token sequences of which the last id may not follow the rest, in the order of `words`, each once.

    A word is written in two ways: as it is at the start of a text, and with a space before it, which most
    vocabularies have tokens of their own for. The latter is left out where the former is its tail, for that
    one forbids it already. A space the client put before a word means neither.

    Raises InvalidArgument with a violation for each word that has no tokens or too many.
    """
    violations = Violations()
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = word.lstrip()
        plain = await tokenizer.encode(bare, add_special_tokens=False)
        violations.need_count(FIELD, len(plain), "tokens", 1, MAX_SEQUENCE_IDS, index=index)
        if not 1 <= len(plain) <= MAX_SEQUENCE_IDS:
            continue
        spaced = await tokenizer.encode(f" {bare}", add_special_tokens=False)
        found[tuple(plain)] = None
        if spaced[-len(plain) :] != plain and 1 <= len(spaced) <= MAX_SEQUENCE_IDS:
            found[tuple(spaced)] = None
    violations.need_count(FIELD, len(found), "token sequences", 0, MAX_SEQUENCES)
    violations.raise_if_any()
    return [list(sequence) for sequence in found]
