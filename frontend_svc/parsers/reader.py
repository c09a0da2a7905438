"""Reads text that arrives in pieces, by generators that suspend until there is more. Knows no format.

A grammar is a generator that yields whenever it needs more text. Every function here takes the same
characters regardless of how the text was split, and examines each of them a fixed number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Waits: TypeAlias = Generator[None, None, T]

SPACE = " \t\r\n"
_SPACE_RUN = re.compile(f"[{SPACE}]*")


class Markers:
    """Texts to search for. None may contain another: which is found first would depend on the splitting."""

    __slots__ = ("_max_held", "_pattern", "_starts", "texts")

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(re.escape(text) for text in texts))
        self._max_held = max(len(text) for text in texts) - 1
        self._starts = frozenset(text[:end] for text in texts for end in range(1, len(text)))

    def find(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def num_held(self, text: str, at: int) -> int:
        """Number of characters at the end of `text` that may be the beginning of a marker."""
        for num_chars in range(min(self._max_held, len(text) - at), 0, -1):
            if text[-num_chars:] in self._starts:
                return num_chars
        return 0


class Reader:
    """The unread text is `text[at:]`. Taken text can be recorded, so that it can be emitted unchanged.

    prefix: text at the end of the prompt; it is read like any other but never recorded.
    on_take: called with all text that is taken, if set.
    """

    __slots__ = ("_num_unrecorded", "_record", "at", "is_cut", "is_ended", "on_take", "text")

    def __init__(self, prefix: str = "") -> None:
        self.text = prefix
        self.at = 0
        self.is_ended = self.is_cut = False
        self.on_take: Callable[[str], object] | None = None
        self._record: list[str] | None = None
        self._num_unrecorded = len(prefix)

    def push(self, text: str) -> None:
        """Append to the unread text."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def push_back(self, text: str) -> None:
        """Put taken text back before the unread text."""
        self.text = text + self.text[self.at :]
        self.at = 0

    def end(self, *, is_cut: bool) -> None:
        """Signal that no more text comes; `is_cut`: though the model did not end it."""
        self.is_ended, self.is_cut = True, is_cut

    def take(self, end: int) -> str:
        """Take the text up to index `end`."""
        taken = self.text[self.at : end]
        self.at += len(taken)
        num_unrecorded = min(self._num_unrecorded, len(taken))
        self._num_unrecorded -= num_unrecorded
        if self._record is not None:
            self._record.append(taken[num_unrecorded:])
        if self.on_take is not None:
            self.on_take(taken)
        return taken

    @property
    def recorded(self) -> str:
        """The text taken since the record began."""
        return "".join(self._record or ())

    def begin_record(self) -> None:
        """Start a new record of the text taken from now on."""
        self._record = []

    def end_record(self) -> str:
        """Stop recording; returns the text taken since the record began."""
        recorded = self.recorded
        self._record = None
        return recorded

    def has_more(self) -> Waits[bool]:
        """Wait for unread text; False if the text has ended."""
        while self.at == len(self.text):
            if self.is_ended:
                return False
            yield
        return True

    def peek(self) -> Waits[str]:
        """The next character, not taken; empty if the text has ended."""
        return self.text[self.at] if (yield from self.has_more()) else ""


def read_until(reader: Reader, markers: Markers, sink: Callable[[str], None]) -> Waits[str | None]:
    """Pass the text before the first marker to `sink`; returns that marker, not taken, or None at the end."""
    while True:
        found = markers.find(reader.text, reader.at)
        if found is not None:
            if found.start() > reader.at:
                sink(reader.take(found.start()))
            return found.group()
        num_held = 0 if reader.is_ended else markers.num_held(reader.text, reader.at)
        if len(reader.text) - num_held > reader.at:
            sink(reader.take(len(reader.text) - num_held))
        if reader.is_ended:
            return None
        yield


def read_run(reader: Reader, run: re.Pattern[str], max_chars: int) -> Waits[str]:
    """Take the next characters that match `run`, a pattern of any number of one character class."""
    parts: list[str] = []
    num_left = max_chars
    while num_left and (yield from reader.has_more()):
        found = run.match(reader.text, reader.at, reader.at + num_left)
        if found is None or not found.group():
            break
        parts.append(reader.take(found.end()))
        num_left -= len(parts[-1])
    return "".join(parts)


def skip_space(reader: Reader) -> Waits[bool]:
    """Take white space; returns whether a line ended in it."""
    has_line_break = False
    while (yield from reader.has_more()):
        found = _SPACE_RUN.match(reader.text, reader.at)
        if found is None or not found.group():
            break
        has_line_break = "\n" in reader.take(found.end()) or has_line_break
    return has_line_break


def read_one_of(reader: Reader, texts: Iterable[str]) -> Waits[str]:
    """Take the one of `texts` that comes next. Empty if none does; a matching prefix is taken then."""
    matching, num_read = list(texts), 0
    while True:
        char = yield from reader.peek()
        matching = [text for text in matching if char and text[num_read] == char]
        if not matching:
            return ""
        reader.take(reader.at + 1)
        num_read += 1
        for text in matching:
            if len(text) == num_read:
                return text


def read_all(reader: Reader, sink: Callable[[str], None]) -> Waits[None]:
    """Pass all text to `sink` until it ends."""
    while (yield from reader.has_more()):
        sink(reader.take(len(reader.text)))
