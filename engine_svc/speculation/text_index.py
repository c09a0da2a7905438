"""A text that grows, and where in it pairs of tokens have occurred. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

MIN_LENGTH = 2  # of a match
_MAX_LENGTH = 32
_MAX_CANDIDATES = 8
SEPARATOR = -1  # between texts in one index: no match and no continuation goes over it


@dataclass(frozen=True, slots=True)
class Match:
    """The end of a text, found in an index. end: where the same tokens end there."""

    index: TextIndex
    length: int
    end: int

    def following(self, limit: int) -> list[int]:
        """Up to `limit` tokens that follow. They repeat themselves where the text ends."""
        tokens, end = self.index.tokens, self.end
        found = tokens[end : end + limit]
        if SEPARATOR in found:
            return found[: found.index(SEPARATOR)]
        period = len(tokens) - end
        return found + [found[position % period] for position in range(len(found), limit)]


class TextIndex:
    """Adding a token and finding matches take a time that does not depend on the text's length."""

    __slots__ = ("_before", "_latest", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # by pair, the end of its latest occurrence
        self._before = [0]  # by end of a pair, the end of its occurrence before; 0: none

    def extend(self, token_ids: Sequence[int]) -> None:
        tokens, latest, before = self.tokens, self._latest, self._before
        last = tokens[-1] if tokens else SEPARATOR
        end = len(tokens)
        for token in token_ids:
            end += 1
            pair = (last, token)
            if last < 0 or token < 0:
                before.append(0)
            else:
                before.append(latest.get(pair, 0))
                latest[pair] = end
            last = token
        tokens += token_ids

    def find_own_end(self) -> Match | None:
        """The longest of the latest earlier occurrences of the text's end."""
        return self._longest(self.tokens, self._before[-1]) if len(self.tokens) > MIN_LENGTH else None

    def find_end_of(self, text: Sequence[int]) -> Match | None:
        """The longest of the latest occurrences of the end of another text."""
        return self._longest(text, self._latest.get((text[-2], text[-1]), 0)) if len(text) > 1 else None

    def _longest(self, text: Sequence[int], end: int) -> Match | None:
        tokens, best, best_end = self.tokens, 0, 0
        for _ in range(_MAX_CANDIDATES):
            if not end:
                break
            most = min(_MAX_LENGTH, end, len(text))
            length = MIN_LENGTH
            while length < most and tokens[end - length - 1] == text[-length - 1]:
                length += 1
            if length > best and end < len(tokens) and tokens[end] != SEPARATOR:
                best, best_end = length, end
                if length == _MAX_LENGTH:
                    break
            end = self._before[end]
        return Match(self, best, best_end) if best else None
