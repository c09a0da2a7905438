"""Where reasoning ends, behind which a constraint may begin."""

from __future__ import annotations

from collections.abc import Sequence


def has_ended(token_ids: Sequence[int], opening: Sequence[int], closing: Sequence[int]) -> bool:
    """Whether the last marker among the tokens of a prompt is one that closes reasoning."""
    ended_at = _last_index(token_ids, closing)
    return ended_at >= 0 and ended_at > _last_index(token_ids, opening)


def begins_at(token_ids: Sequence[int], marker: Sequence[int]) -> int:
    """The index after the first `marker` among the tokens, -1 if there is none; 0 for an empty marker."""
    length = len(marker)
    for end in range(length, len(token_ids) + 1):
        if tuple(token_ids[end - length : end]) == tuple(marker):
            return end
    return -1


def _last_index(token_ids: Sequence[int], marker: Sequence[int]) -> int:
    """Where the last `marker` begins, -1 if there is none or it is empty."""
    length = len(marker)
    for start in range(len(token_ids) - length, -1, -1) if marker else ():
        if token_ids[start] == marker[0] and tuple(token_ids[start : start + length]) == tuple(marker):
            return start
    return -1
