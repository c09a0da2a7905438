"""Rewritten schemas as sets of values that can be intersected, from which rules of a grammar are written.

Only keywords of a rewritten schema are read. Intersections follow the order of the schemas, as the order of
properties is that of the text.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeAlias

from engine_svc.features.structured_output.json_schema.document import SchemaTooLarge
from engine_svc.features.structured_output.json_schema.languages import Texts, pattern_of
from engine_svc.features.structured_output.json_schema.logic import (
    ARRAY_KEYWORDS,
    NUMBER_KEYWORDS,
    OBJECT_KEYWORDS,
    STRING_KEYWORDS,
)
from engine_svc.features.structured_output.json_schema.numbers import Numbers, is_number
from engine_svc.features.structured_output.json_schema.patterns import UnsupportedPattern, ecma_pattern

MAX_STEPS = 20_000  # of one document: schemas read and pairs intersected
_TYPES = ("null", "boolean", "object", "array", "string", "number")
_KEYWORDS_OF = {
    "object": OBJECT_KEYWORDS, "array": ARRAY_KEYWORDS, "string": STRING_KEYWORDS, "number": NUMBER_KEYWORDS,
}  # fmt: skip
_READ = frozenset(
    {
        "$defs", "$ref", "allOf", "anyOf", "const", "enum", "type", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "format", "properties",
        "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties", "items",
        "prefixItems", "minItems", "maxItems", "contains",
    }
)  # fmt: skip


class UnsupportedShape(ValueError):
    """A schema that cannot be read; the message is a keyword and the reason."""

    def __init__(self, keyword: str, reason: str, place: str = "") -> None:
        """place: the pointer to it."""
        super().__init__(f"{keyword}: {reason}")
        self.keyword = keyword
        self.reason = reason
        self.place = place


@dataclass(frozen=True, slots=True, eq=False)
class Anything:
    """All values."""


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """Null, a bool, or one of both bools."""

    values: frozenset[bool | None]


@dataclass(frozen=True, slots=True, eq=False)
class NumberShape:
    numbers: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class TextShape:
    """Texts that satisfy all of some schemas of texts."""

    schemas: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ArrayShape:
    prefix: tuple[Shape, ...] = ()
    items: Shape = field(default_factory=Anything)
    low: int = 0
    high: int | None = None
    contained: tuple[Shape, ...] = ()  # each is the shape of an item


@dataclass(frozen=True, slots=True, eq=False)
class ObjectShape:
    properties: Mapping[str, Shape] = field(default_factory=dict)
    patterns: Mapping[str, Shape] = field(default_factory=dict)
    additional: Shape = field(default_factory=Anything)
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None

    def property(self, name: str) -> Shape:
        if name in self.properties:
            return self.properties[name]
        for pattern, shape in self.patterns.items():
            if matches(pattern, name):
                return shape
        return self.additional


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One of several shapes; of none there is no value."""

    shapes: tuple[Shape, ...] = ()


Shape: TypeAlias = Anything | Fixed | NumberShape | TextShape | ArrayShape | ObjectShape | Reference | Choice
ANYTHING = Anything()
NOTHING = Choice()


def is_nothing(shape: Shape) -> bool:
    return isinstance(shape, Choice) and not shape.shapes


def matches(pattern: str, name: str) -> bool:
    """Whether a translated pattern is in a name."""
    try:
        return re.search(pattern.replace("$", r"\Z"), name) is not None
    except re.error:
        raise UnsupportedShape("pattern", f"the texts of {pattern!r} are not known") from None


class Shapes:
    """The shapes of a document: of its root, and of its definitions by name."""

    def __init__(self, document: dict[str, Any]) -> None:
        """Raises UnsupportedShape, SchemaTooLarge."""
        self._schemas: dict[str, Any] = document.get("$defs", {})
        self._open: set[str] = set()
        self._num_steps = 0
        self.definitions: dict[str, Shape] = {}
        self.root = self.read({name: value for name, value in document.items() if name != "$defs"})
        for name in self._schemas:
            self._definition(name)
        self._remove_empty()

    def read(self, schema: Any) -> Shape:
        if isinstance(schema, bool):
            return ANYTHING if schema else NOTHING
        self._spend()
        for name in schema:
            if name not in _READ:
                raise UnsupportedShape(name, "it stands beside numbers that need another form")
        shape = self._of_keywords(schema)
        if "const" in schema:
            shape = self.both(shape, self._of_value(schema["const"]))
        if "enum" in schema:
            shape = self.both(shape, choice([self._of_value(value) for value in schema["enum"]]))
        for name, value in schema.items():
            if name == "allOf":
                for entry in value:
                    shape = self.both(shape, self.read(entry))
            elif name == "anyOf":
                shape = self.both(shape, choice([self.read(entry) for entry in value]))
            elif name == "$ref":
                shape = self.both(shape, Reference(value.removeprefix("#/$defs/")))
        return shape

    def both(self, first: Shape, second: Shape) -> Shape:
        """The values of both shapes."""
        self._spend()
        match first, second:
            case (Anything(), shape) | (shape, Anything()):
                return shape
            case (Reference(), Reference()) if first.name == second.name:
                return first
            case (Reference(), _):
                return self.both(self._definition(first.name), second)
            case (_, Reference()):
                return self.both(first, self._definition(second.name))
            case (Choice(), _):
                return choice([self.both(shape, second) for shape in first.shapes])
            case (_, Choice()):
                return choice([self.both(first, shape) for shape in second.shapes])
            case (Fixed(), Fixed()):
                values = first.values & second.values
                return Fixed(values) if values else NOTHING
            case (NumberShape(), NumberShape()):
                return number_shape(first.numbers & second.numbers)
            case (TextShape(), TextShape()):
                return _both_texts(first, second)
            case (ArrayShape(), ArrayShape()):
                return self._both_arrays(first, second)
            case (ObjectShape(), ObjectShape()):
                return self._both_objects(first, second)
        return NOTHING

    def _remove_empty(self) -> None:
        """Take out references to definitions without a value, of which a rule could not be written."""
        empty: set[str] = set()
        while more := {name for name, shape in self.definitions.items() if is_nothing(shape)} - empty:
            empty |= more
            self.definitions = {name: self._without(shape, empty) for name, shape in self.definitions.items()}
            self.root = self._without(self.root, empty)

    def _without(self, shape: Shape, empty: set[str]) -> Shape:
        """The shape without the definitions of these names."""
        match shape:
            case Reference():
                return NOTHING if shape.name in empty else shape
            case Choice():
                return choice([self._without(part, empty) for part in shape.shapes])
            case ArrayShape():
                return self._possible(
                    replace(
                        shape,
                        prefix=tuple(self._without(part, empty) for part in shape.prefix),
                        items=self._without(shape.items, empty),
                        contained=tuple(self._without(part, empty) for part in shape.contained),
                    )
                )
            case ObjectShape():
                return object_shape(
                    replace(
                        shape,
                        properties={
                            name: self._without(part, empty) for name, part in shape.properties.items()
                        },
                        patterns={name: self._without(part, empty) for name, part in shape.patterns.items()},
                        additional=self._without(shape.additional, empty),
                    )
                )
        return shape

    def _definition(self, name: str) -> Shape:
        if name not in self.definitions:
            if name in self._open:
                raise UnsupportedShape("$ref", "it leads to itself beside other keywords")
            self._open.add(name)
            self.definitions[name] = self.read(self._schemas[name])
            self._open.discard(name)
        return self.definitions[name]

    def _spend(self) -> None:
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise SchemaTooLarge(f"json_schema with its numbers takes more than {MAX_STEPS} steps")

    def _of_keywords(self, schema: dict[str, Any]) -> Shape:
        """The keywords of the types."""
        words = schema.keys()
        if not words & ({"type"} | NUMBER_KEYWORDS | STRING_KEYWORDS | ARRAY_KEYWORDS | OBJECT_KEYWORDS):
            return ANYTHING
        types = schema.get("type", _TYPES)
        names = [types] if isinstance(types, str) else list(types)
        return choice([self._of_type(name, schema) for name in names])

    def _of_type(self, name: str, schema: dict[str, Any]) -> Shape:
        match name:
            case "null":
                return Fixed(frozenset({None}))
            case "boolean":
                return Fixed(frozenset({False, True}))
            case "number" | "integer":
                return number_shape(Numbers.of(schema, is_integer=name == "integer"))
            case "string":
                kept = {word: value for word, value in schema.items() if word in STRING_KEYWORDS}
                return text_shape([kept] if kept else [])
            case "array":
                return self._possible(
                    ArrayShape(
                        tuple(map(self.read, schema.get("prefixItems", ()))),
                        self.read(schema.get("items", True)),
                        schema.get("minItems", 0),
                        schema.get("maxItems"),
                        tuple(self.read(schema[name]) for name in ("contains",) if name in schema),
                    )
                )
        return self._of_object(schema)

    def _of_object(self, schema: dict[str, Any]) -> Shape:
        patterns = {
            pattern: self.read(entry) for pattern, entry in schema.get("patternProperties", {}).items()
        }
        properties = {}
        for name, entry in schema.get("properties", {}).items():
            properties[name] = self.read(entry)
            for pattern, shape in patterns.items():
                if matches(pattern, name):
                    properties[name] = self.both(properties[name], shape)
        return object_shape(
            ObjectShape(
                properties,
                patterns,
                self.read(schema.get("additionalProperties", True)),
                tuple(dict.fromkeys(schema.get("required", ()))),
                schema.get("minProperties", 0),
                schema.get("maxProperties"),
            )
        )

    def _of_value(self, value: Any) -> Shape:
        """The shape of one value."""
        self._spend()
        if is_number(value):
            return NumberShape(Numbers.only(value))
        if isinstance(value, str):
            return TextShape(({"const": value},))
        if isinstance(value, list):
            entries = tuple(map(self._of_value, value))
            return ArrayShape(entries, NOTHING, len(entries), len(entries))
        if isinstance(value, dict):
            members = {name: self._of_value(entry) for name, entry in value.items()}
            return ObjectShape(members, {}, NOTHING, tuple(members))
        return Fixed(frozenset({value}))

    def _both_arrays(self, first: ArrayShape, second: ArrayShape) -> Shape:
        length = max(len(first.prefix), len(second.prefix))
        pairs = zip(*(_prefix_of(shape, length) for shape in (first, second)), strict=True)
        return self._possible(
            ArrayShape(
                tuple(self.both(*pair) for pair in pairs),
                self.both(first.items, second.items),
                max(first.low, second.low),
                _lower(first.high, second.high),
                (*first.contained, *second.contained),
            )
        )

    def _possible(self, shape: ArrayShape) -> Shape:
        """The shape; nothing if it has no items that it must contain."""
        items = [*shape.prefix, shape.items]
        for contained in shape.contained:
            if all(is_nothing(self.both(item, contained)) for item in items):
                return NOTHING
        return array_shape(shape)

    def _both_objects(self, first: ObjectShape, second: ObjectShape) -> Shape:
        names = dict.fromkeys([*first.properties, *second.properties])
        patterns: dict[str, Shape] = {}
        for pattern in dict.fromkeys([*first.patterns, *second.patterns]):
            sides = [shape.patterns.get(pattern, shape.additional) for shape in (first, second)]
            patterns[pattern] = self.both(*sides)
        return object_shape(
            ObjectShape(
                {name: self.both(first.property(name), second.property(name)) for name in names},
                patterns,
                self.both(first.additional, second.additional),
                tuple(dict.fromkeys([*first.required, *second.required])),
                max(first.low, second.low),
                _lower(first.high, second.high),
            )
        )


def number_shape(numbers: Numbers) -> Shape:
    return NOTHING if numbers.is_empty else NumberShape(numbers)


def array_shape(shape: ArrayShape) -> Shape:
    """The shape with the most items that it can have; nothing if these are too few."""
    high = shape.high
    possible = [index for index, entry in enumerate(shape.prefix) if is_nothing(entry)]
    if possible:
        high = _lower(high, possible[0])
    elif is_nothing(shape.items):
        high = _lower(high, len(shape.prefix))
    low = max(shape.low, bool(shape.contained))
    if (high is not None and low > high) or any(map(is_nothing, shape.contained)):
        return NOTHING
    return replace(shape, low=low, high=high)


def object_shape(shape: ObjectShape) -> Shape:
    """Nothing if a required property has no value."""
    if any(is_nothing(shape.property(name)) for name in shape.required):
        return NOTHING
    if shape.high is not None and max(shape.low, len(shape.required)) > shape.high:
        return NOTHING
    if shape.low > len(shape.required) and is_nothing(shape.additional) and not shape.patterns:
        possible = [name for name, entry in shape.properties.items() if not is_nothing(entry)]
        if len({*possible, *shape.required}) < shape.low:
            return NOTHING
    return shape


def _both_texts(first: TextShape, second: TextShape) -> Shape:
    schemas = [*first.schemas]
    schemas += [schema for schema in second.schemas if schema not in schemas]
    texts = [schema["const"] for schema in schemas if "const" in schema]
    if not texts:
        return text_shape(schemas)
    if any(text != texts[0] or not _has_text(schema, text) for text in texts for schema in schemas):
        return NOTHING
    formats = [{"format": schema["format"]} for schema in schemas if "format" in schema]
    return TextShape(({"const": texts[0]}, *formats))


def text_shape(schemas: Sequence[Mapping[str, Any]]) -> Shape:
    """The shape of texts; nothing if no text is known to satisfy all schemas."""
    parts = [Texts.of(ecma_pattern(schema["pattern"])) for schema in schemas if "pattern" in schema]
    low = max((schema.get("minLength", 0) for schema in schemas), default=0)
    highs = [schema["maxLength"] for schema in schemas if "maxLength" in schema]
    if highs and low > min(highs):
        return NOTHING
    if low or highs:
        parts.append(Texts.of(f"^[^]{{{low},{min(highs, default='')}}}$"))
    if len(parts) > 1:
        with suppress(UnsupportedPattern):
            if pattern_of(reduce(operator.and_, parts)) is None:
                return NOTHING
    return TextShape(tuple(schemas))


def _has_text(schema: Mapping[str, Any], text: str) -> bool:
    """Whether a text satisfies the keywords of a schema other than `format`."""
    if not schema.get("minLength", 0) <= len(text) <= schema.get("maxLength", len(text)):
        return False
    return "pattern" not in schema or matches(schema["pattern"], text)


def choice(shapes: list[Shape]) -> Shape:
    flat: list[Shape] = []
    for shape in shapes:
        if isinstance(shape, Anything):
            return shape
        flat.extend(shape.shapes if isinstance(shape, Choice) else [shape])
    return flat[0] if len(flat) == 1 else Choice(tuple(flat))


def _prefix_of(shape: ArrayShape, length: int) -> list[Shape]:
    return [*shape.prefix, *[shape.items] * (length - len(shape.prefix))]


def _lower(first: int | None, second: int | None) -> int | None:
    known = [limit for limit in (first, second) if limit is not None]
    return min(known, default=None)
