"""Incremental checker for JSON (RFC 8259) that builds no values. Knows no tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol, TypeAlias

from frontend_svc.parsers.reader import SPACE, Reader, Waits

# Clients parse arguments with recursive parsers, which must not exceed their recursion limit.
_MAX_DEPTH = 128

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE_RUN = re.compile(f"[{SPACE}]*")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_DIGITS = dict.fromkeys("0123456789", "int")
# State machine of numbers: by state, the next state for each character that may follow.
_NUMBER: dict[str, dict[str, str]] = {
    "minus": {**_DIGITS, "0": "zero"},
    "zero": {".": "dot", "e": "e", "E": "e"},
    "int": {**_DIGITS, ".": "dot", "e": "e", "E": "e"},
    "dot": dict.fromkeys("0123456789", "fraction"),
    "fraction": {**dict.fromkeys("0123456789", "fraction"), "e": "e", "E": "e"},
    "e": {**dict.fromkeys("0123456789", "exponent"), "+": "sign", "-": "sign"},
    "sign": dict.fromkeys("0123456789", "exponent"),
    "exponent": dict.fromkeys("0123456789", "exponent"),
}
_WHOLE_NUMBERS = frozenset({"zero", "int", "fraction", "exponent"})
_NUMBER_STARTS = {**_DIGITS, "0": "zero", "-": "minus"}


class JsonScanner:
    """Scans one value: `is_whole` once it is complete, `is_broken` at a character that cannot follow."""

    __slots__ = ("_is_key", "_number", "_open", "_rest", "_state", "is_broken", "is_whole")

    def __init__(self) -> None:
        self._state: _State = _value
        self._open: list[str] = []
        self._is_key = False
        self._number = ""
        self._rest = ""
        self.is_whole = False
        self.is_broken = False

    @property
    def is_inside(self) -> bool:
        """Whether an object or array is open."""
        return bool(self._open)

    def scan(self, text: str, at: int) -> int:
        """Scan `text` from index `at`; returns the index of the first character not taken."""
        while at < len(text) and not self.is_whole and not self.is_broken:
            at = self._state(self, text, at)
        return at

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at

    def _enter(self, opening: str, at: int) -> int:
        if len(self._open) >= _MAX_DEPTH:
            return self._break(at)
        self._open.append(opening)
        self._state = _first_key if opening == "{" else _first_element
        return at + 1

    def _leave(self, at: int) -> int:
        self._open.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._state = _after_value
        self.is_whole = not self._open


_State: TypeAlias = Callable[[JsonScanner, str, int], int]


class Scanner(Protocol):
    """Scans one value incrementally; see `JsonScanner`."""

    is_whole: bool
    is_broken: bool

    def scan(self, text: str, at: int) -> int: ...


def read_scanned(reader: Reader, scanner: Scanner, sink: Callable[[str], None]) -> Waits[bool]:
    """Pass the rest of a value to `sink` as it arrives; False at an invalid character, which is not taken."""
    while not scanner.is_whole and not scanner.is_broken and (yield from reader.has_more()):
        end = scanner.scan(reader.text, reader.at)
        if end > reader.at:
            sink(reader.take(end))
    return scanner.is_whole


def read_json(reader: Reader, sink: Callable[[str], None]) -> Waits[bool]:
    """Pass a JSON value to `sink` as it arrives; False at an invalid character, which is not taken."""
    return (yield from read_scanned(reader, JsonScanner(), sink))


def _skip_space(text: str, at: int) -> int:
    found = _SPACE_RUN.match(text, at)
    return at if found is None else found.end()


def _value(scanner: JsonScanner, text: str, at: int) -> int:
    at = _skip_space(text, at)
    if at == len(text):
        return at
    char = text[at]
    if char in "{[":
        return scanner._enter(char, at)
    if char == '"':
        scanner._is_key, scanner._state = False, _string
    elif char in _LITERALS:
        scanner._rest, scanner._state = _LITERALS[char][1:], _literal
    elif char in _NUMBER_STARTS:
        scanner._number, scanner._state = _NUMBER_STARTS[char], _in_number
    else:
        return scanner._break(at)
    return at + 1


def _first_element(scanner: JsonScanner, text: str, at: int) -> int:
    at = _skip_space(text, at)
    if at < len(text) and text[at] == "]":
        return scanner._leave(at)
    if at < len(text):
        scanner._state = _value
    return at


def _first_key(scanner: JsonScanner, text: str, at: int) -> int:
    at = _skip_space(text, at)
    if at < len(text) and text[at] == "}":
        return scanner._leave(at)
    if at < len(text):
        scanner._state = _key
    return at


def _key(scanner: JsonScanner, text: str, at: int) -> int:
    at = _skip_space(text, at)
    if at == len(text):
        return at
    if text[at] != '"':
        return scanner._break(at)
    scanner._is_key, scanner._state = True, _string
    return at + 1


def _colon(scanner: JsonScanner, text: str, at: int) -> int:
    at = _skip_space(text, at)
    if at == len(text):
        return at
    if text[at] != ":":
        return scanner._break(at)
    scanner._state = _value
    return at + 1


def _after_value(scanner: JsonScanner, text: str, at: int) -> int:
    at = _skip_space(text, at)
    if at == len(text):
        return at
    char, is_object = text[at], scanner._open[-1] == "{"
    if char == ",":
        scanner._state = _key if is_object else _value
        return at + 1
    if char == ("}" if is_object else "]"):
        return scanner._leave(at)
    return scanner._break(at)


def _string(scanner: JsonScanner, text: str, at: int) -> int:
    found = _STRING_RUN.match(text, at)
    at = at if found is None else found.end()
    if at == len(text):
        return at
    if text[at] == "\\":
        scanner._state = _escape
        return at + 1
    if text[at] != '"':
        return scanner._break(at)
    if scanner._is_key:
        scanner._state = _colon
    else:
        scanner._end_value()
    return at + 1


def _escape(scanner: JsonScanner, text: str, at: int) -> int:
    if text[at] == "u":
        scanner._rest, scanner._state = "....", _code
        return at + 1
    if text[at] not in _ESCAPES:
        return scanner._break(at)
    scanner._state = _string
    return at + 1


def _code(scanner: JsonScanner, text: str, at: int) -> int:
    if text[at] not in _HEX:
        return scanner._break(at)
    scanner._rest = scanner._rest[1:]
    if not scanner._rest:
        scanner._state = _string
    return at + 1


def _literal(scanner: JsonScanner, text: str, at: int) -> int:
    if text[at] != scanner._rest[0]:
        return scanner._break(at)
    scanner._rest = scanner._rest[1:]
    if not scanner._rest:
        scanner._end_value()
    return at + 1


def _in_number(scanner: JsonScanner, text: str, at: int) -> int:
    following = _NUMBER[scanner._number].get(text[at])
    if following is not None:
        scanner._number = following
        return at + 1
    if scanner._number not in _WHOLE_NUMBERS:
        return scanner._break(at)
    scanner._end_value()
    return at
