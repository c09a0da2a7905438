"""The texts of single tokens, as log probabilities show them. Knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, and a token at least one of them.
MAX_CONTEXT_TOKENS = 4
# Most of a vocabulary: the texts of the tokens that are seen, a few MB.
_MAX_KEPT = 65_536
_ANCHORS = ("a", "e", "x", "0", "1", "A")


class TokenTexts:
    """What each token of a tokenizer adds to the text before it; special tokens are shown as spelled.

    A token of whole characters has one text wherever it stands, which is remembered. One that has bytes of a
    character that several tokens spell is looked up with the tokens before it, and adds what becomes whole
    with it: nothing where it only begins the character, and all of the character where it ends it.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_kept: int = _MAX_KEPT) -> None:
        self._tokenizer = tokenizer
        self._anchor = _anchor_ids(tokenizer)
        self._anchor_text = self._decode(self._anchor)
        self._marks = _replacement_ids(tokenizer)
        # A method of the instance's own, for a cache shared by all tokenizers would mix their texts.
        self._text_alone = lru_cache(maxsize=max_kept)(self._find_text_alone)

    def added(self, context: Sequence[int], token_id: int) -> str:
        """What `token_id` adds to the tokens of `context`, of which the last four count.

        An empty context is the start of a text, where some decoders drop a space.
        """
        if not context:
            text = self._decode([token_id])
            return text if self._is_whole(text, token_id) else text.rstrip(_REPLACEMENT)
        text = self._text_alone(token_id)
        return text if self._is_whole(text, token_id) else self._text_completed(context, token_id, text)

    def added_each(self, context: Sequence[int], token_ids: Sequence[int]) -> list[str]:
        """What each of `token_ids` would add in the same place, behind the tokens of `context`."""
        return [self.added(context, token_id) for token_id in token_ids]

    def _is_whole(self, text: str, token_id: int) -> bool:
        return _REPLACEMENT not in text or token_id in self._marks

    def _find_text_alone(self, token_id: int) -> str:
        text = self._decode([*self._anchor, token_id])
        if text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        # The decoder has written the token and the one before it in a way of their own.
        return self._decode([token_id])

    def _text_completed(self, context: Sequence[int], token_id: int, alone: str) -> str:
        # From few tokens to many: a context that begins within a character is not valid and does not mislead.
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
    """A token to stand before others, so that none of them is at the start of a text; empty without one."""
    special = tokenizer.get_added_tokens_decoder()
    for text in _ANCHORS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if ids and not any(token_id in special for token_id in ids):
            return [ids[-1]]
    return []


def _replacement_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that spell U+FFFD itself: to a decoder it looks like bytes that are no character."""
    ids = tokenizer.encode(_REPLACEMENT, add_special_tokens=False).ids
    return frozenset(ids) if len(ids) == 1 and tokenizer.decode(ids) == _REPLACEMENT else frozenset()
