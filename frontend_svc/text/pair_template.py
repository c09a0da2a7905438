"""Two texts as one prompt, for models that score pairs. Knows no requests."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer


class PairTemplate:
    """How a tokenizer joins two texts into one prompt: what it puts before, between and behind them.

    Learned from one pair, so that texts can be tokenized apart, each once, and given ids can be joined too.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        encoding = tokenizer.encode("a", "b", add_special_tokens=True)
        parts: tuple[list[int], list[int], list[int]] = ([], [], [])
        num_seen = 0
        for token_id, sequence in zip(encoding.ids, encoding.sequence_ids, strict=True):
            if sequence is None:
                parts[num_seen].append(token_id)
            else:
                num_seen = sequence + 1
        self._before, self._between, self._behind = parts

    def join(self, first: Sequence[int], second: Sequence[int]) -> list[int]:
        """The prompt of two texts that were tokenized without special tokens."""
        return [*self._before, *first, *self._between, *second, *self._behind]
