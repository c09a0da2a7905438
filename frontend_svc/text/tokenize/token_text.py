"""The texts of single tokens, for logprobs. Knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, and a token at least one of them.
MAX_CONTEXT_TOKENS = 4
# Enough for most of a vocabulary; takes a few MB.
_MAX_KEPT = 65_536
_ANCHORS = ("a", "e", "x", "0", "1", "A")


class TokenTexts:
    """The text that each token adds to the text before it; special tokens are shown as spelled.

    A token of whole characters has the same text at every position, which is cached. A token with some bytes
    of a character that spans several tokens is decoded together with the tokens before it, and adds what it
    completes: nothing if it begins the character, the whole character if it ends it.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_kept: int = _MAX_KEPT) -> None:
        self._tokenizer = tokenizer
        self._anchor = _anchor_ids(tokenizer)
        self._anchor_text = self._decode(self._anchor)
        self._marks = _replacement_ids(tokenizer)
        # One cache per instance: a cache shared by all tokenizers would mix their texts.
        self._text_alone = lru_cache(maxsize=max_kept)(self._find_text_alone)

    def added(self, context: Sequence[int], token_id: int) -> str:
        """The text that `token_id` adds after the tokens of `context`, of which the last four are used.

        An empty context is the start of a text, where some decoders drop a space.
        """
        if not context:
            text = self._decode([token_id])
            return text if self._is_whole(text, token_id) else text.rstrip(_REPLACEMENT)
        text = self._text_alone(token_id)
        return text if self._is_whole(text, token_id) else self._text_completed(context, token_id, text)

    def added_each(self, context: Sequence[int], token_ids: Sequence[int]) -> list[str]:
        """The text that each of `token_ids` would add after the tokens of `context`."""
        return [self.added(context, token_id) for token_id in token_ids]

    def _is_whole(self, text: str, token_id: int) -> bool:
        return _REPLACEMENT not in text or token_id in self._marks

    def _find_text_alone(self, token_id: int) -> str:
        text = self._decode([*self._anchor, token_id])
        if text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        # The decoder changes the text of the anchor when this token follows it.
        return self._decode([token_id])

    def _text_completed(self, context: Sequence[int], token_id: int, alone: str) -> str:
        # From few tokens to many: a context that begins within a character is invalid and thus skipped.
        for num_tokens in range(1, min(MAX_CONTEXT_TOKENS, len(context)) + 1):
            before = list(context[-num_tokens:])
            text = self._decode([*before, token_id]).rstrip(_REPLACEMENT)
            if _REPLACEMENT in text:
                continue
            known = self._decode(before).rstrip(_REPLACEMENT)
            if len(text) > len(known) and text.startswith(known):
                return text[len(known) :]
        return alone.rstrip(_REPLACEMENT)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _anchor_ids(tokenizer: Tokenizer) -> list[int]:
    """A token to put before others so that none of them is at the start of a text; empty if none fits."""
    special = tokenizer.get_added_tokens_decoder()
    for text in _ANCHORS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if ids and not any(token_id in special for token_id in ids):
            return [ids[-1]]
    return []


def _replacement_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that spell U+FFFD itself, which decoded text cannot distinguish from invalid bytes."""
    ids = tokenizer.encode(_REPLACEMENT, add_special_tokens=False).ids
    return frozenset(ids) if len(ids) == 1 and tokenizer.decode(ids) == _REPLACEMENT else frozenset()
