"""Where a short sequence occurs in a longer one."""

from __future__ import annotations

from collections.abc import Sequence


def comes_last(items: Sequence[int], part: Sequence[int], other: Sequence[int]) -> bool:
    """Whether `part` occurs, and no `other` behind its last occurrence."""
    index = _last_index(items, part)
    return index >= 0 and index > _last_index(items, other)


def end_of_first(items: Sequence[int], part: Sequence[int]) -> int:
    """The index after the first occurrence of `part`, -1 if there is none; 0 if it is empty."""
    length = len(part)
    for end in range(length, len(items) + 1):
        if tuple(items[end - length : end]) == tuple(part):
            return end
    return -1


def _last_index(items: Sequence[int], part: Sequence[int]) -> int:
    """Where the last `part` begins, -1 if there is none or it is empty."""
    length = len(part)
    for start in range(len(items) - length, -1, -1) if part else ():
        if items[start] == part[0] and tuple(items[start : start + length]) == tuple(part):
            return start
    return -1
