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


class _NotLiteral(ValueError):
    """An expression is no call with literal arguments."""


def read_python_calls(source: str) -> list[tuple[str, str]]:
    """The names and JSON arguments of a list of calls; empty if `source` is anything else.

    Arguments must be named, and be strings, numbers, None, True, False, or lists, tuples and dicts of these.
    """
    try:
        tree = ast.parse(_ESCAPE.sub(_keep_unknown_escape, source), mode="eval")
        if not isinstance(tree.body, ast.List):
            return []
        return [_call(element) for element in tree.body.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _keep_unknown_escape(found: re.Match[str]) -> str:
    # Python would keep the backslash as well, but with a warning.
    return found.group() if found.group(1) in _KNOWN_ESCAPES else "\\" + found.group()


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise _NotLiteral
    arguments: dict[str, _Literal] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise _NotLiteral
        arguments[keyword.arg] = _value(keyword.value)
    return _name(node.func), _json(arguments)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise _NotLiteral


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
