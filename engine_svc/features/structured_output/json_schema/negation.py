"""The negation of a schema in other keywords, among values with known properties."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from engine_svc.features.structured_output.json_schema.languages import Texts
from engine_svc.features.structured_output.json_schema.logic import (
    ANNOTATIONS,
    ANY_VALUE,
    ASSERTIONS,
    KINDS,
    MAX_DEPTH,
    Known,
    Prover,
    is_trivial,
    kind_of,
    kinds_of_type,
    type_of_kinds,
)  # fmt: skip
from engine_svc.features.structured_output.json_schema.patterns import (
    UnsupportedPattern,
    pattern_without,
    texts_of,
    translated,
)

MAX_NEGATED = 16  # branches of a oneOf: all pairs are compared
MAX_NAMED = 16  # names of a pattern
_SIZED = {"Length": "string", "Items": "array", "Properties": "object"}  # by the end of a keyword


class CannotNegate(ValueError):
    """A keyword without a negation, which the message names."""


def negation(prover: Prover, schema: Any, known: Known = ANY_VALUE, depth: int = 0) -> Any:
    """A schema of the values of `known` that do not satisfy `schema`.

    Raises CannotNegate for a keyword without a negation.
    """
    if isinstance(schema, bool):
        return not schema
    if depth > MAX_DEPTH:
        raise CannotNegate("$ref")
    prover.spend(len(schema))
    negation_of = _Negation(prover, schema, known, depth)
    return _any_of(
        [
            negation_of.keyword(keyword, value)
            for keyword, value in schema.items()
            if keyword not in ANNOTATIONS and not is_trivial(keyword, known.kinds)
        ]
    )


def _any_of(branches: list[Any]) -> Any:
    branches = [branch for branch in branches if branch is not False]
    if len(branches) == 1:
        return branches[0]
    return {"anyOf": branches} if branches else False


@dataclass(frozen=True, slots=True)
class _Negation:
    """A schema under negation. A value that breaks one of its keywords breaks the schema."""

    prover: Prover
    schema: dict[str, Any]
    known: Known
    depth: int

    def keyword(self, keyword: str, value: Any) -> Any:
        """A schema of values that break the keyword."""
        match keyword:
            case "type":
                return self._other_kinds(kinds_of_type(value))
            case "const":
                return _other_values([value], self.known.kinds)
            case "enum":
                return _other_values(value, self.known.kinds)
            case "not":
                return value
            case "allOf":
                return {"anyOf": [self._inner(entry, self.known) for entry in value]}
            case "anyOf":
                return {"allOf": [self._inner(entry, self.known) for entry in value]}
            case "oneOf" if self._are_disjoint(value):
                return {"allOf": [self._inner(entry, self.known) for entry in value]}
            case "$ref":
                return self._inner(self.prover.document.resolve(self.schema), self.known)
            case "required":
                absent = [{"type": "object", "properties": {name: False}} for name in value]
                return {"anyOf": absent} if absent else False
            case "properties":
                return self._wrong_property(value)
            case "patternProperties":
                return self._wrong_named(value)
            case "propertyNames":
                return self._wrong_name(value)
            case "items" if self._excludes_items(value):
                return {"type": "array", "minItems": 1}
            case "items" if "prefixItems" not in self.schema:
                wrong = self._inner(value)
                return {"type": "array", "contains": wrong} if wrong is not False else False
            case "contains" if not self.schema.keys() & {"minContains", "maxContains"}:
                return {"type": "array", "items": self._inner(value)}
            case "additionalProperties" if self._has_known_names():
                return self._wrong_additional(value)
            case "minimum":
                return {"type": "number", "exclusiveMaximum": value}
            case "maximum":
                return {"type": "number", "exclusiveMinimum": value}
            case "exclusiveMinimum":
                return {"type": "number", "maximum": value}
            case "exclusiveMaximum":
                return {"type": "number", "minimum": value}
            case "minLength" | "minItems" | "minProperties":
                size = keyword.removeprefix("min")
                return {"type": _SIZED[size], f"max{size}": value - 1} if value > 0 else False
            case "pattern":
                return self._without_pattern(value)
            case "maxLength" | "maxItems" | "maxProperties":
                size = keyword.removeprefix("max")
                return {"type": _SIZED[size], f"min{size}": value + 1}
        if keyword in ASSERTIONS:
            raise CannotNegate(keyword)
        return False  # an annotation

    def _inner(self, schema: Any, known: Known = ANY_VALUE) -> Any:
        return negation(self.prover, schema, known, self.depth + 1)

    def _other_kinds(self, kinds: frozenset[str]) -> Any:
        others = self.known.kinds - kinds
        if "fraction" in others and "integer" not in others and "integer" in self.known.kinds:
            raise CannotNegate("type")
        return {"type": type_of_kinds(others)} if others else False

    def _without_pattern(self, pattern: str) -> Any:
        try:
            others = self.prover.pattern_of(~Texts.of(pattern))
        except UnsupportedPattern:
            raise CannotNegate("pattern") from None
        return False if others is None else {"type": "string", "pattern": others}

    def _are_disjoint(self, branches: list[Any]) -> bool:
        return len(branches) <= MAX_NEGATED and all(
            self.prover.is_unsatisfiable(first, second) for first, second in combinations(branches, 2)
        )

    def _wrong_property(self, properties: dict[str, Any]) -> Any:
        known, wrong = self.known, []
        for name, entry in properties.items():
            if known.names is None or name in known.names:
                inner = self.prover.known(*known.properties[name]) if name in known.properties else ANY_VALUE
                wrong.append((name, self._inner(entry, inner)))
        return _with_one_of(wrong)

    def _wrong_named(self, patterns: dict[str, Any]) -> Any:
        """Of the names of a pattern, where they are few, one with another value."""
        wrong = []
        for pattern, entry in patterns.items():
            names = self._names_of(pattern)
            negated = self._inner(entry)
            if not names and negated is not False:
                raise CannotNegate("patternProperties")
            wrong += [(name, negated) for name in names]
        return _with_one_of(wrong)

    def _wrong_name(self, schema: Any) -> Any:
        """One of the names that a schema excludes, where they are few or all."""
        negated = self._inner(schema, Known(frozenset({"string"})))
        while isinstance(negated, dict) and negated.keys() == {"anyOf"} and len(negated["anyOf"]) == 1:
            negated = negated["anyOf"][0]
        if negated is False:
            return False
        if negated is True or negated in ({"type": "string"}, {"type": ["string"]}):
            return {"type": "object", "minProperties": 1}
        match {name: entry for name, entry in negated.items() if name != "type" and name not in ANNOTATIONS}:
            case {"const": name, **rest} if not rest:
                names = [name]
            case {"enum": names, **rest} if not rest:
                pass
            case {"pattern": pattern, **rest} if not rest:
                names = self._names_of(pattern)
            case _:
                names = []
        if not names:
            raise CannotNegate("propertyNames")
        return _with_one_of([(name, True) for name in names if isinstance(name, str)])

    def _names_of(self, pattern: str) -> list[str]:
        try:
            return texts_of(translated(pattern), MAX_NAMED)
        except UnsupportedPattern:
            return []

    def _excludes_items(self, schema: Any) -> bool:
        items = self.known.items
        return (
            bool(items) and "prefixItems" not in self.schema and self.prover.is_unsatisfiable(schema, *items)
        )

    def _has_known_names(self) -> bool:
        return self.known.names is not None and not self.schema.get("patternProperties")

    def _wrong_additional(self, schema: Any) -> Any:
        others = (self.known.names or frozenset()) - set(self.schema.get("properties", ()))
        negated = self._inner(schema)
        return _with_one_of([(name, negated) for name in sorted(others)])


def _with_one_of(properties: list[tuple[str, Any]]) -> Any:
    """A schema of objects that have one of the properties, with a value of its schema."""
    choices = [
        {"type": "object", "required": [name], "properties": {name: schema}}
        for name, schema in properties
        if schema is not False
    ]
    return {"anyOf": choices} if choices else False


def _other_values(values: list[Any], within: frozenset[str]) -> Any:
    """A schema of the values of some kinds, except a few."""
    by_kind: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for value in values:
        by_kind[kind_of(value)].append(value)
    choices: list[Any] = []
    if free := sorted(kind for kind in within & {"null", "array", "object", "string"} if not by_kind[kind]):
        choices.append({"type": free})
    if "boolean" in within:
        choices += [{"const": value} for value in (True, False) if value not in by_kind["boolean"]]
    if "string" in within and by_kind["string"]:
        choices.append({"type": "string", "pattern": pattern_without(by_kind["string"])})
    for kind, keyword in (("array", "minItems"), ("object", "minProperties")):
        if by_kind[kind] and kind in within:
            if any(by_kind[kind]):
                raise CannotNegate("const")
            choices.append({"type": kind, keyword: 1})
    if within & {"integer", "fraction"}:
        points = sorted({*by_kind["integer"], *by_kind["fraction"]})
        choices += _intervals(points, "number" if "fraction" in within else "integer")
    return {"anyOf": choices} if choices else False


def _intervals(points: list[Any], kind: str) -> list[Any]:
    """Schemas of the numbers before, between and behind points."""
    intervals = []
    for low, high in pairwise([None, *points, None]):
        if kind == "integer" and low is not None and high is not None and high - low <= 1:
            continue
        limits = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        intervals.append(
            {"type": kind} | {name: point for name, point in limits.items() if point is not None}
        )
    return intervals
