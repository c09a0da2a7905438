"""Draws schemas with numbers and texts at the edges of what backends read, and instances near to them."""

from __future__ import annotations

import random
from decimal import Context, Decimal
from typing import Any

from tests.fuzz.schemas.exact import is_number

_EXACT = Context(prec=200)
_NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 10, 99, 100, 1000, (1 << 53) - 1, 1 << 53, (1 << 53) + 1, -(1 << 53) - 1,
    (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) + 1, 12345678901234567890123, *map(Decimal, (
        "0.1", "0.2", "0.25", "0.5", "0.75", "1.5", "-1.5", "2.0", "1e2", "-0.0", "0.001", "1e-7", "99.99",
        "-0.5", "9007199254740993.5", "0.1000000000000000055",
    )),
)  # fmt: skip
_STEPS = (
    1,
    2,
    3,
    5,
    7,
    10,
    25,
    1000,
    (1 << 53) + 1,
    *map(Decimal, ("0.5", "0.25", "0.1", "0.01", "0.3", "2.5")),
)
_DELTAS = (0, 0, 1, -1, 2, *map(Decimal, ("0.1", "-0.1", "0.25", "0.5", "1e-6")))
_TEXTS = (
    "", "a", "b", "ab", "ba", "aa", '"', "\\", 'a"b', "a\\b", "\\n", "\n", "\t", "/", "é", "😀", "a😀",
    "\u2028", "0", "{", "a b", "\\u0061", '\\"', "''",
)  # fmt: skip
_PATTERNS = (
    "^a", "b$", "a|b", "^[ab]*$", '^[^"]*$', r"^\\", r'["\\]', "^.$", "^.{1,2}$", "^[a-z]+$", r"\d",
    '^(a|b"c)$', r"^\S*$", "^[^a]", r"\n", r"^\u0061", r"^[^\\]+$", "^$", "", "😀", r"^\w+$",
)  # fmt: skip
_NAMES = ("a", "b", 'q"', "\\", "é", "")
_KINDS = ("null", "boolean", "object", "array", "string", "number", "integer")


class Draws:
    """One schema, and instances that are near to it."""

    def __init__(self, seed: object) -> None:
        self._noise = random.Random(str(seed))
        self._names = self._noise.sample(("x", "y"), self._noise.choice((0, 0, 1, 2)))
        self._values: list[Any] = [None, True, False, 0, 1, "", "a", [], {}]  # of the schema, and near them
        self.schema = self._drawn_schema()

    def instances(self, count: int) -> list[Any]:
        return [self._instance(2) for _ in range(count)]

    def _drawn_schema(self) -> Any:
        schema = self._schema(3)
        if self._names and isinstance(schema, dict):
            schema = schema | {"$defs": {name: self._schema(2) for name in self._names}}
        return schema

    def _chance(self, share: float) -> bool:
        return self._noise.random() < share

    def _number(self) -> Any:
        number = self._noise.choice(_NUMBERS)
        if self._chance(0.3):
            number = self._near(number, self._noise.choice(_DELTAS))
        self._values.append(number)
        return number

    def _near(self, number: Any, delta: Any) -> Any:
        near = _EXACT.add(Decimal(number), Decimal(delta))
        return int(near) if near == int(near) and self._chance(0.9) else near

    def _text(self) -> str:
        text = self._noise.choice(_TEXTS)
        self._values.append(text)
        return text

    def _value(self, depth: int) -> Any:
        kind = self._noise.randrange(8 if depth else 6)
        if kind < 3:
            return self._number()
        if kind < 5:
            return self._text()
        if kind == 5:
            return self._noise.choice((None, True, False))
        if kind == 6:
            return [self._value(depth - 1) for _ in range(self._noise.randrange(3))]
        return {self._noise.choice(_NAMES): self._value(depth - 1) for _ in range(self._noise.randrange(2))}

    def _schema(self, depth: int) -> Any:
        if self._chance(0.04):
            return self._chance(0.7)
        if self._names and self._chance(0.12):
            return self._reference()
        if depth == 0 or self._chance(0.55):
            return self._plain(depth)
        schema = self._plain(depth) if self._chance(0.5) else {}
        return schema | self._joined(depth - 1)

    def _reference(self) -> Any:
        return {"$ref": self._noise.choice(["#", *(f"#/$defs/{name}" for name in self._names)])}

    def _plain(self, depth: int) -> dict[str, Any]:
        """A schema of one type, of several, or without a type."""
        kind = self._noise.choice(
            ("number", "number", "integer", "string", "string", "object", "array", "values")
        )
        if kind == "values":
            if self._chance(0.5):
                return {"const": self._value(1)}
            return {"enum": [self._value(1) for _ in range(self._noise.randint(1, 3))]}
        schema: dict[str, Any] = {"type": kind} if self._chance(0.8) else {}
        if self._chance(0.1):
            schema["type"] = self._noise.sample(_KINDS, 2)
        makers = {"string": self._of_text, "object": self._of_object, "array": self._of_array}
        return schema | (makers[kind](depth) if kind in makers else self._of_number())

    def _of_number(self) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        low = self._number()
        if self._chance(0.6):
            schema[self._noise.choice(("minimum", "exclusiveMinimum"))] = low
        if self._chance(0.6):
            high = self._number() if self._chance(0.3) else self._near(low, abs(self._noise.choice(_DELTAS)))
            schema[self._noise.choice(("maximum", "exclusiveMaximum"))] = high
            self._values.append(high)
        if self._chance(0.25):
            schema["multipleOf"] = self._noise.choice(_STEPS)
            self._values.append(schema["multipleOf"])
        return schema

    def _of_text(self, _depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        if self._chance(0.6):
            schema["pattern"] = self._noise.choice(_PATTERNS)
        if self._chance(0.25):
            schema["minLength"] = self._noise.randrange(3)
        if self._chance(0.35):
            schema["maxLength"] = self._noise.randrange(4)
        return schema

    def _of_object(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        inner = max(0, depth - 1)
        if self._chance(0.8):
            names = self._noise.sample(_NAMES, self._noise.randint(1, 2))
            schema["properties"] = {name: self._schema(inner) for name in names}
            if self._chance(0.6):
                schema["required"] = [name for name in names if self._chance(0.6)]
        if self._chance(0.5):
            schema["additionalProperties"] = False if self._chance(0.7) else self._schema(inner)
        if self._chance(0.12):
            schema["patternProperties"] = {self._noise.choice(_PATTERNS): self._schema(inner)}
        if self._chance(0.12):
            schema["propertyNames"] = self._of_text(0) if self._chance(0.6) else {"enum": [self._text()]}
        if self._chance(0.1):
            schema[self._noise.choice(("minProperties", "maxProperties"))] = self._noise.randrange(3)
        if self._chance(0.06):
            schema["dependentRequired"] = {self._noise.choice(_NAMES): [self._noise.choice(_NAMES)]}
        return schema

    def _of_array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        inner = max(0, depth - 1)
        if self._chance(0.7):
            schema["items"] = self._schema(inner)
        if self._chance(0.3):
            schema["prefixItems"] = [self._schema(inner) for _ in range(self._noise.randint(1, 2))]
        if self._chance(0.4):
            schema["minItems"] = self._noise.randrange(3)
        if self._chance(0.5):
            schema["maxItems"] = self._noise.randrange(4)
        if self._chance(0.06):
            schema["uniqueItems"] = True
        if self._chance(0.1):
            schema["contains"] = self._schema(inner)
        return schema

    def _joined(self, depth: int) -> dict[str, Any]:
        kind = self._noise.choice(("allOf", "anyOf", "anyOf", "oneOf", "oneOf", "not", "if", "if"))
        if kind == "not":
            return {"not": self._schema(min(depth, 1))}
        if kind == "if":
            parts = {"if": self._schema(min(depth, 1))}
            parts |= {"then": self._schema(depth)} if self._chance(0.8) else {}
            return parts | ({"else": self._schema(depth)} if self._chance(0.6) else {})
        return {kind: [self._schema(depth) for _ in range(self._noise.randint(1, 3))]}

    def _instance(self, depth: int) -> Any:
        kind = self._noise.randrange(10)
        if depth and kind == 0:
            return [self._instance(depth - 1) for _ in range(self._noise.randrange(3))]
        if depth and kind == 1:
            names = _NAMES if self._chance(0.9) else _TEXTS
            return {self._noise.choice(names): self._instance(depth - 1)} if self._chance(0.9) else {}
        value = self._noise.choice(self._values)
        if is_number(value) and self._chance(0.6):
            value = self._near(value, self._noise.choice(_DELTAS))
        return self._noise.choice(_TEXTS) if isinstance(value, str) and self._chance(0.3) else value
