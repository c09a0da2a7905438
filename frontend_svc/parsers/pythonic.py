"""Tool calls of Llama 3.2 and 4: a Python list of calls with literal arguments."""

from __future__ import annotations

import re

from frontend_svc.parsers.grammar_parser import ToolGrammar
from frontend_svc.parsers.python_calls import read_python_calls
from frontend_svc.parsers.reader import Markers, Reader, Waits, read_one_of, read_run, read_until, skip_space
from frontend_svc.parsers.writer import CallWriter

_START, _END = "<|python_start|>", "<|python_end|>"
_OUTSIDE = Markers("[", _START)
_NAME = re.compile(r"[\w.]*")
_MAX_NAME_CHARS = 256
# The syntax tree of a text takes about a hundred times its size.
_MAX_CHARS = 64 * 1024
_MAX_DEPTH = 32
_PLAIN = re.compile(r"[^\[\](){}'\"]*")
_IN_STRING = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def _parse(reader: Reader, calls: CallWriter) -> Waits[None]:
    while (marker := (yield from read_until(reader, _OUTSIDE, calls.content))) is not None:
        calls.begin()
        if marker == _START:
            yield from read_one_of(reader, (_START,))
            yield from skip_space(reader)
        source = yield from _read_list(reader, calls)
        found = [] if source is None else read_python_calls(source)
        if not found or not all(calls.knows(name) for name, _ in found):
            calls.abandon()
            continue
        for name, arguments_json in found:
            calls.name(name)
            calls.arguments(arguments_json)
            calls.commit()
        if marker == _START:
            yield from _read_end(reader, calls)


def _read_list(reader: Reader, calls: CallWriter) -> Waits[str | None]:
    """Take `[name(...), ...]` up to its closing bracket; None as soon as it cannot be a list of calls.

    The name is checked first, so that other text in brackets is held back only for one word.
    """
    if not (yield from read_one_of(reader, "[")):
        return None
    yield from skip_space(reader)
    name = yield from read_run(reader, _NAME, _MAX_NAME_CHARS)
    yield from skip_space(reader)
    if not calls.knows(name) or (yield from reader.peek()) != "(":
        return None
    rest = yield from _read_brackets(reader)
    return None if rest is None else f"[{name}{rest}"


class _Source:
    """The part of a list that was taken, up to the limit."""

    __slots__ = ("num_left", "parts")

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.num_left = _MAX_CHARS

    def take_char(self, reader: Reader) -> None:
        self._add(reader.take(reader.at + 1))

    def take_run(self, reader: Reader, run: re.Pattern[str]) -> Waits[str]:
        taken = yield from read_run(reader, run, self.num_left)
        self._add(taken)
        return taken

    def _add(self, text: str) -> None:
        self.parts.append(text)
        self.num_left -= len(text)


def _read_brackets(reader: Reader) -> Waits[str | None]:
    """Take all up to the closing bracket of the list; None if brackets do not match, or at a limit."""
    source, expected = _Source(), ["]"]
    while expected:
        yield from source.take_run(reader, _PLAIN)
        char = yield from reader.peek()
        if not char or not source.num_left:
            return None
        if char in _IN_STRING:
            if not (yield from _read_string(reader, source, char)):
                return None
            continue
        if char in _CLOSING:
            expected.append(_CLOSING[char])
        elif char != expected.pop():
            return None
        if len(expected) > _MAX_DEPTH:
            return None
        source.take_char(reader)
    return "".join(source.parts)


def _read_string(reader: Reader, source: _Source, quote: str) -> Waits[bool]:
    """Take a string from its opening to its closing quotes, of which there may be three each."""
    source.take_char(reader)
    num_closing = 1
    if (yield from reader.peek()) == quote:
        source.take_char(reader)
        if (yield from reader.peek()) != quote:
            return True
        source.take_char(reader)
        num_closing = 3
    num_quotes = 0
    while num_quotes < num_closing:
        if (yield from source.take_run(reader, _IN_STRING[quote])):
            num_quotes = 0
        char = yield from reader.peek()
        # A backslash is taken together with the character after it.
        if not char or source.num_left < 2:
            return False
        source.take_char(reader)
        num_quotes = num_quotes + 1 if char == quote else 0
        if char == "\\" and (yield from reader.has_more()):
            source.take_char(reader)
    return True


def _read_end(reader: Reader, calls: CallWriter) -> Waits[None]:
    calls.begin()
    yield from skip_space(reader)
    if (yield from read_one_of(reader, (_END,))):
        calls.drop_record()
    else:
        calls.abandon()


PYTHONIC = ToolGrammar(
    name="pythonic",
    grammar=_parse,
    markers=frozenset({_START, _END}),
    named_prefix="[{name}(",
    any_prefix="[",
)
