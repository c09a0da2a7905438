"""Text and YAML into typed option values: numbers, sizes, switches, lists. Knows no option and no source."""

from __future__ import annotations

import json
import math
import re
import types
import typing
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)([bB]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class ValueType:
    """The values that an option accepts: a scalar type, whether it may be None, whether it is a list."""

    scalar: type
    is_optional: bool = False
    is_list: bool = False
    is_size: bool = False
    choices: tuple[str, ...] | None = None

    @property
    def is_switch(self) -> bool:
        """True for a flag that takes no value."""
        return self.scalar is bool and not self.is_list


def value_type(
    annotation: Any, *, is_size: bool = False, choices: tuple[str, ...] | None = None
) -> ValueType:
    """The value type of an annotation: str, int, float, bool, Literal, `X | None` or `tuple[X, ...]`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        if len(inner) == 1 and len(arguments) == 2:
            one = value_type(inner[0], is_size=is_size, choices=choices)
            return ValueType(one.scalar, True, one.is_list, is_size, one.choices)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        one = value_type(arguments[0], choices=choices)
        return ValueType(one.scalar, False, True, is_size, one.choices)
    if origin is typing.Literal and all(isinstance(argument, str) for argument in arguments):
        return ValueType(str, choices=choices or arguments)
    if annotation in (str, int, float, bool):
        return ValueType(annotation, is_size=is_size, choices=choices)
    raise TypeError(f"an option cannot have the type {annotation}")


def parse_text(text: str, kind: ValueType) -> Any:
    """Parse `text`. Raises ValueError with a message that names what is accepted."""
    if kind.is_optional and text.lower() in ("none", "null", ""):
        return None
    if kind.is_list:
        return tuple(_parse_scalar(part.strip(), kind) for part in text.split(",") if part.strip())
    return _parse_scalar(text, kind)


def parse_yaml(value: Any, kind: ValueType) -> Any:
    """Convert a YAML node. Text is parsed as on a command line; other types must match."""
    if isinstance(value, str):
        return parse_text(value, kind)
    if value is None and kind.is_optional:
        return None
    if kind.is_list:
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is not a list")
        element = ValueType(kind.scalar, is_size=kind.is_size, choices=kind.choices)
        return tuple(parse_yaml(entry, element) for entry in value)
    if kind.scalar is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # YAML parses an unquoted 8 as a number even for an option that takes text.
    if kind.scalar is str and isinstance(value, int | float) and not isinstance(value, bool):
        return _parse_scalar(str(value), kind)
    # Options that take JSON take the object itself, too.
    if kind.scalar is str and isinstance(value, dict):
        try:
            return _parse_scalar(json.dumps(value), kind)
        except TypeError as error:
            raise ValueError(f"{value!r} is no JSON: {error}") from error
    if type(value) is not kind.scalar or _is_no_number(value):
        raise ValueError(f"{value!r} is not {_described(kind)}")
    return value


def parse_size(text: str) -> int:
    """Parse a count or a number of bytes, such as `16k` or `2M`.

    A small letter is decimal (16k = 16,000), a capital binary (2M = 2 * 1024 * 1024), as in vLLM; `MiB` is
    binary and `kB` or `MB` decimal, as in the standards.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 4096, 16k, 2M or 1.5GiB")
    number, prefix, binary_mark, byte_mark = match.groups()
    if binary_mark and not prefix:
        raise ValueError(f"{text!r} is not a size such as 4096, 16k, 2M or 1.5GiB")
    is_binary = bool(binary_mark) or (prefix.isupper() and not byte_mark)
    size = Fraction(number) * (1024 if is_binary else 1000) ** _POWERS[prefix.lower()]
    if size.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return int(size)


def _parse_scalar(text: str, kind: ValueType) -> Any:
    if kind.choices is not None and text not in kind.choices:
        raise ValueError(f"{text!r} is not one of {', '.join(kind.choices)}")
    if kind.scalar is str:
        return text
    if kind.scalar is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError(f"{text!r} is not true or false")
        return _BOOLEANS[text.lower()]
    if kind.is_size:
        return parse_size(text)
    try:
        value = kind.scalar(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not {_described(kind)}") from error
    if _is_no_number(value):
        raise ValueError(f"{text!r} is not {_described(kind)}")
    return value


def _is_no_number(value: Any) -> bool:
    # NaN compares false with everything, so it could pass range checks.
    return isinstance(value, float) and math.isnan(value)


def _described(kind: ValueType) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind.scalar]
