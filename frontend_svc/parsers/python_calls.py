"""Converts Python calls with literal arguments to names and JSON. Runs no code, and knows no stream."""

from __future__ import annotations

import ast
import json
import math
import re
from typing import TypeAlias

_Literal: TypeAlias = "str | int | float | bool | list[_Literal] | dict[str, _Literal] | None"

# JSON literals, which models mix in.
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = frozenset("\n\\'\"abfnrtv0123xNuU")
# Converting longer integers takes time that grows with the square of their length.
_MAX_INT_BITS = 4096


_CALL = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*\((.*)\)\s*", re.DOTALL)
_CUT_CALL = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(\(\s*[^\s].*)", re.DOTALL)
_ARGUMENT = re.compile(r"\s*([^\W\d]\w*)\s*=(.*)", re.DOTALL)
# The syntax tree of a text takes about a hundred times its size.
_MAX_CHARS = 64 * 1024
_MAX_DEPTH = 32
_PLAIN = re.compile(r"[^\[\](){}'\",]*")
_IN_STRING = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class BracketScanner:
    """Scans Python source up to the bracket that closes `opening`; breaks at a wrong one, or at a limit.

    commas: their positions in the text scanned, without those in inner brackets.
    """

    __slots__ = (
        "_expected", "_is_escaped", "_is_triple", "_num_chars", "_quote", "_quotes_in_row", "commas",
        "is_broken", "is_whole",
    )  # fmt: skip

    def __init__(self, opening: str) -> None:
        self._expected = [_CLOSING[opening]]
        self._quote = ""  # of the string that is open, or was just closed if it was empty
        self._quotes_in_row = 0
        self._is_triple = self._is_escaped = False
        self._num_chars = 0
        self.commas: list[int] = []
        self.is_whole = False
        self.is_broken = False

    def scan(self, text: str, at: int) -> int:
        """Scan `text` from index `at`; returns the index of the first character not taken."""
        while at < len(text) and not self.is_whole and not self.is_broken:
            is_string = bool(self._quote) and not self._is_empty_string()
            run = (_IN_STRING[self._quote] if is_string else _PLAIN).match(text, at)
            end = at if run is None or self._is_escaped else run.end()
            if end > at:
                self._quotes_in_row = 0
                self._quote = self._quote if is_string else ""
            elif is_string:
                self._scan_in_string(text[at])
                end += 1
            else:
                self._scan_plain(text[at])
                end += not self.is_broken
            self._num_chars += end - at
            self.is_broken = self.is_broken or self._num_chars > _MAX_CHARS
            at = end
        return at

    def _is_empty_string(self) -> bool:
        return self._quotes_in_row == 2 and not self._is_triple

    def _scan_in_string(self, char: str) -> None:
        if self._is_escaped or char != self._quote:
            self._is_escaped = char == "\\" and not self._is_escaped
            self._quotes_in_row = 0
            return
        self._quotes_in_row += 1
        if self._quotes_in_row == 3 if self._is_triple else self._quotes_in_row == 1:
            self._quote, self._is_triple, self._quotes_in_row = "", False, 0

    def _scan_plain(self, char: str) -> None:
        is_third = self._is_empty_string() and char == self._quote
        self._quote, self._quotes_in_row = "", 0
        if char in _IN_STRING:
            self._quote, self._is_triple = char, is_third
            self._quotes_in_row = 0 if is_third else 1
        elif char in _CLOSING:
            self._expected.append(_CLOSING[char])
            self.is_broken = len(self._expected) > _MAX_DEPTH
        elif char == ",":
            if len(self._expected) == 1:
                self.commas.append(self._num_chars)
        elif char != self._expected.pop():
            self.is_broken = True
        self.is_whole = not self._expected


class _NotLiteral(ValueError):
    """An expression is no call with literal arguments."""


def read_python_calls(source: str) -> list[tuple[str, str]]:
    """The names and JSON arguments of a list of calls; empty if `source` is anything else.

    Arguments must be named, and be strings, numbers, None, True, False, or lists, tuples and dicts of these.
    Names of calls may have dashes and dots, and those of arguments may be Python's keywords.
    """
    try:
        return [_call(element) for element in _split(source, "[")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def read_cut_calls(source: str) -> tuple[list[tuple[str, str]], tuple[str, str] | None]:
    """The whole calls of a list that was cut off, and the call in which it was.

    That call has the JSON of its arguments before the cut, without the one in which it was and the closing
    brace. None: it was cut before its arguments. Both are empty if the list is not of calls.
    """
    try:
        *whole, last = _split(source, "[", is_cut=True)
        calls = [_call(element) for element in whole]
        if _CALL.fullmatch(last):
            return [*calls, _call(last)], None
        found = _CUT_CALL.fullmatch(last)
        if found is None:
            return calls, None
        arguments = _split(found.group(2), "(", is_cut=True)[:-1]
        return calls, (found.group(1), _json(_arguments(arguments)).removesuffix("}"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [], None


def _split(source: str, opening: str, *, is_cut: bool = False) -> list[str]:
    """The elements between the brackets around `source`; `is_cut`: the last of both are not whole."""
    scanner = BracketScanner(opening)
    num_scanned = scanner.scan(source, 1)
    if not source.startswith(opening) or num_scanned < len(source) or scanner.is_whole == is_cut:
        raise _NotLiteral
    starts = [1, *(comma + 2 for comma in scanner.commas)]
    ends = [*starts[1:], len(source) + is_cut]
    elements = [source[start : end - 1] for start, end in zip(starts, ends, strict=True)]
    return elements if is_cut or elements[-1].strip() else elements[:-1]


def _call(source: str) -> tuple[str, str]:
    found = _CALL.fullmatch(source)
    if found is None:
        raise _NotLiteral
    return found.group(1), _json(_arguments(_split(f"({found.group(2)})", "(")))


def _arguments(elements: list[str]) -> dict[str, _Literal]:
    arguments: dict[str, _Literal] = {}
    for element in elements:
        name, value = _argument(element)
        if name in arguments:
            raise _NotLiteral
        arguments[name] = value
    return arguments


def _argument(source: str) -> tuple[str, _Literal]:
    found = _ARGUMENT.fullmatch(source)
    if found is None or not found.group(2).strip():
        raise _NotLiteral
    # In brackets, so that it may have line breaks.
    value = _ESCAPE.sub(_keep_unknown_escape, found.group(2))
    return found.group(1), _value(ast.parse(f"({value}\n)", mode="eval").body)


def _keep_unknown_escape(found: re.Match[str]) -> str:
    # Python would keep the backslash as well, but with a warning.
    return found.group() if found.group(1) in _KNOWN_ESCAPES else "\\" + found.group()


def _value(node: ast.expr) -> _Literal:
    if isinstance(node, ast.Constant):
        return _constant(node.value)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return _members(node)
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    raise _NotLiteral


def _members(node: ast.Dict) -> dict[str, _Literal]:
    members: dict[str, _Literal] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            raise _NotLiteral
        members[key.value] = _value(value)
    return members


def _constant(value: object) -> _Literal:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int) and value.bit_length() <= _MAX_INT_BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise _NotLiteral


def _json(value: _Literal) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # Python escapes can produce a lone surrogate, which cannot be encoded and thus not sent.
    return text if _is_text(text) else json.dumps(value)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
