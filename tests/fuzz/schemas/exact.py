"""JSON with exact numbers, and a validator of the drawn keywords: nothing here is the product's code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

_MAX_EXPONENT_DIGITS = 4


class Unjudged(ValueError):
    """A reference leads to itself without a step into the value, or an exponent is too large to compare."""


def read(text: str) -> Any:
    """Raises ValueError, Unjudged."""
    return json.loads(text, parse_float=_decimal)


def _decimal(text: str) -> Decimal:
    if len(text.lower().partition("e")[2]) > _MAX_EXPONENT_DIGITS:
        raise Unjudged
    return Decimal(text)


def written(value: Any) -> str:
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(key)}: {written(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def key_of(value: Any) -> Any:
    """Equal for values that are equal as JSON."""
    if isinstance(value, list):
        return ("list", *map(key_of, value))
    if isinstance(value, dict):
        return ("object", *sorted((name, key_of(entry)) for name, entry in value.items()))
    return ("number", Fraction(value)) if is_number(value) else (type(value).__name__, value)


def is_valid(schema: Any, value: Any) -> bool:
    """Raises Unjudged."""
    return _Validator(schema).is_valid(schema, value, ())


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    # ECMA's end is the text's, its classes are ASCII's. No pattern is drawn with another `$` or `.`.
    for ecma, python in (
        ("$", r"\Z"),
        (".", r"[^\n\r\u2028\u2029]"),
        (r"\S", r"[^\t\n\v\f\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]"),
        (r"\w", "[0-9A-Za-z_]"),
        (r"\d", "[0-9]"),
    ):
        pattern = pattern.replace(ecma, python)
    return re.compile(pattern)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": is_number,
    "integer": lambda value: is_number(value) and Fraction(value).denominator == 1,
}
_OF_NUMBERS: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "multipleOf": lambda value, limit: value % limit == 0,
}
_OF_SIZES: dict[str, tuple[type, Callable[[int, int], bool]]] = {
    f"{side}{size}": (kind, compare)
    for size, kind in (("Length", str), ("Items", list), ("Properties", dict))
    for side, compare in (("min", int.__ge__), ("max", int.__le__))
}


class _Validator:
    def __init__(self, root: Any) -> None:
        self._root = root

    def is_valid(self, schema: Any, value: Any, seen: tuple[int, ...]) -> bool:
        """seen: identities of the schemas to whose value this one belongs."""
        if isinstance(schema, bool):
            return schema
        if id(schema) in seen:
            raise Unjudged
        inner = (*seen, id(schema))
        return all(self._holds(schema, name, rule, value, inner) for name, rule in schema.items())

    def _holds(self, schema: Any, name: str, rule: Any, value: Any, seen: tuple[int, ...]) -> bool:
        if name in _OF_NUMBERS:
            return not is_number(value) or _OF_NUMBERS[name](Fraction(value), Fraction(rule))
        if name in _OF_SIZES:
            kind, compare = _OF_SIZES[name]
            return not isinstance(value, kind) or compare(len(value), int(rule))
        match name:
            case "type":
                return any(_TYPES[kind](value) for kind in ([rule] if isinstance(rule, str) else rule))
            case "const":
                return bool(key_of(value) == key_of(rule))
            case "enum":
                return key_of(value) in [key_of(entry) for entry in rule]
            case "$ref":
                target = self._root if rule == "#" else self._root["$defs"][rule.removeprefix("#/$defs/")]
                return self.is_valid(target, value, seen)
            case "allOf":
                return all(self.is_valid(entry, value, seen) for entry in rule)
            case "anyOf":
                return any(self.is_valid(entry, value, seen) for entry in rule)
            case "oneOf":
                return sum(self.is_valid(entry, value, seen) for entry in rule) == 1
            case "not":
                return not self.is_valid(rule, value, seen)
            case "if":
                branch = "then" if self.is_valid(rule, value, seen) else "else"
                return self.is_valid(schema.get(branch, True), value, seen)
            case "pattern":
                return not isinstance(value, str) or _pattern(rule).search(value) is not None
        if isinstance(value, list):
            return self._holds_items(schema, name, rule, value)
        return not isinstance(value, dict) or self._holds_members(schema, name, rule, value)

    def _holds_items(self, schema: Any, name: str, rule: Any, value: list[Any]) -> bool:
        match name:
            case "items":
                rest = value[len(schema.get("prefixItems", ())) :]
                return all(self.is_valid(rule, item, ()) for item in rest)
            case "prefixItems":
                return all(self.is_valid(entry, item, ()) for entry, item in zip(rule, value, strict=False))
            case "contains":
                return any(self.is_valid(rule, item, ()) for item in value)
            case "uniqueItems":
                return not rule or len(set(map(key_of, value))) == len(value)
        return True

    def _holds_members(self, schema: Any, name: str, rule: Any, value: dict[str, Any]) -> bool:
        match name:
            case "properties":
                return all(self.is_valid(rule[key], entry, ()) for key, entry in value.items() if key in rule)
            case "patternProperties":
                return all(
                    self.is_valid(inner, entry, ())
                    for key, entry in value.items()
                    for pattern, inner in rule.items()
                    if _pattern(pattern).search(key)
                )
            case "additionalProperties":
                patterns = [_pattern(pattern) for pattern in schema.get("patternProperties", ())]
                known = schema.get("properties", {})
                return all(
                    self.is_valid(rule, entry, ())
                    for key, entry in value.items()
                    if key not in known and not any(pattern.search(key) for pattern in patterns)
                )
            case "propertyNames":
                return all(self.is_valid(rule, key, ()) for key in value)
            case "required":
                return all(key in value for key in rule)
            case "dependentRequired":
                return all(set(names) <= value.keys() for key, names in rule.items() if key in value)
        return True
