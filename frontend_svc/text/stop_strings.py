"""Stop strings: finds them in growing text and never emits a part of one. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string in a text, and how much of the text to keep."""

    stop: str
    num_kept_chars: int


def find_stop(text: str, num_new_chars: int, stops: Sequence[str], *, include: bool) -> StopHit | None:
    """The stop string that completes first within the last `num_new_chars` of `text`.

    Strings that complete at the same character are ranked by their order in `stops`. The kept text ends
    before the stop string, or after it with `include`.
    """
    if num_new_chars <= 0:
        return None
    best: tuple[int, str] | None = None
    for stop in stops:
        start = text.find(stop, max(0, len(text) - num_new_chars - len(stop) + 1))
        if start >= 0 and (best is None or start + len(stop) < best[0]):
            best = (start + len(stop), stop)
    if best is None:
        return None
    end, stop = best
    return StopHit(stop, end if include else end - len(stop))


class StopBuffer:
    """Passes on text that cannot be part of a stop string, and ends it at the first one that completes.

    Without `include` the last `longest stop - 1` characters are held back, as they may be the beginning
    of a stop string. With it nothing is held back, but as many characters are remembered.
    """

    __slots__ = ("_include", "_last_characters", "_lookback", "_stops", "_tail")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._lookback = max(len(stop) for stop in stops) - 1
        self._last_characters = frozenset(stop[-1] for stop in stops)
        self._tail = ""

    def push(self, text: str, num_scanned_chars: int) -> tuple[str, str | None]:
        """Add `text`. Only its last `num_scanned_chars` characters may complete a stop string.

        Returns the text to emit now, and the stop string that ended it. Nothing may be pushed after that.
        """
        whole = self._tail + text
        # Most text has no character that a stop string ends with, so none can have completed.
        if not self._last_characters.isdisjoint(text):
            hit = find_stop(whole, num_scanned_chars, self._stops, include=self._include)
            if hit is not None:
                shown = whole[len(self._tail) if self._include else 0 : hit.num_kept_chars]
                self._tail = ""
                return shown, hit.stop
        num_certain = len(whole) - self._lookback
        if num_certain <= 0:
            self._tail = whole
            return text if self._include else "", None
        self._tail = whole[num_certain:]
        return text if self._include else whole[:num_certain], None

    def flush(self) -> str:
        """The text held back, once no more text comes."""
        held, self._tail = "" if self._include else self._tail, ""
        return held
