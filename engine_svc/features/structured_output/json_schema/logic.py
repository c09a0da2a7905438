"""What can be proved of schemas: that nothing satisfies all of some; and the negation of one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

from engine_svc.features.structured_output.json_schema.document import (
    InvalidSchema,
    SchemaDocument,
    SchemaTooLarge,
)
from engine_svc.features.structured_output.json_schema.patterns import pattern_without

# "fraction" is a number that is not an integer.
KINDS = frozenset({"null", "boolean", "object", "array", "string", "integer", "fraction"})
# Kinds that a type tells apart.
UNITS = tuple(
    map(frozenset, (["object"], ["array"], ["string"], ["integer", "fraction"], ["boolean"], ["null"]))
)
ANNOTATIONS = frozenset(
    {
        "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$comment", "$defs", "definitions",
        "$vocabulary", "title", "description", "default", "examples", "example", "deprecated", "readOnly",
        "writeOnly", "contentEncoding", "contentMediaType", "contentSchema",
    }
)  # fmt: skip
_MAX_DEPTH = 8
_MAX_CALLS = 2_000  # of one proof
MAX_STEPS = 400_000  # of all proofs and searches for a document: parts of schemas looked at; about 2 us each
_MAX_TEXT = 200
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_UNBOUNDED = re.compile(r"[*+{]")
# Which kinds a keyword speaks of; all others satisfy it.
NUMBER_KEYWORDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
STRING_KEYWORDS = frozenset({"minLength", "maxLength", "pattern", "format"})
ARRAY_KEYWORDS = frozenset(
    {
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains",
        "minContains", "maxContains", "unevaluatedItems",
    }
)  # fmt: skip
OBJECT_KEYWORDS = frozenset(
    {
        "properties", "patternProperties", "additionalProperties", "required", "minProperties",
        "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies",
        "unevaluatedProperties",
    }
)  # fmt: skip


class CannotNegate(ValueError):
    """The message names the keyword."""


def kinds_of_type(value: Any) -> frozenset[str]:
    names = value if isinstance(value, list) else [value]
    found: set[str] = set()
    for name in names:
        if name == "number":
            found |= {"integer", "fraction"}
        elif isinstance(name, str) and name in KINDS - {"fraction"}:
            found.add(name)
        else:
            raise InvalidSchema(f"type {name!r} is unknown")
    return frozenset(found)


def type_of_kinds(kinds: frozenset[str]) -> list[str]:
    """The keyword `type`; kinds with "fraction" have "integer", too."""
    names = sorted(kinds - {"integer", "fraction"})
    if "fraction" in kinds:
        return [*names, "number"]
    return [*names, "integer"] if "integer" in kinds else names


def kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def is_trivial(keyword: str, kinds: frozenset[str]) -> bool:
    """Whether all values of these kinds satisfy the keyword."""
    return (
        (keyword in NUMBER_KEYWORDS and not kinds & {"integer", "fraction"})
        or (keyword in STRING_KEYWORDS and "string" not in kinds)
        or (keyword in ARRAY_KEYWORDS and "array" not in kinds)
        or (keyword in OBJECT_KEYWORDS and "object" not in kinds)
    )


def json_key(value: Any) -> str:
    """Equal for values that are equal as JSON."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(json_key, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{json_key(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the values among which a schema is negated."""

    kinds: frozenset[str] = KINDS
    names: frozenset[str] | None = None  # the only properties that objects have; None: any
    items: tuple[Any, ...] = ()  # what all items of arrays satisfy
    properties: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # what each satisfies


_ANY_VALUE = Known()


@dataclass
class _Facts:
    """What several schemas together say."""

    kinds: frozenset[str] = KINDS
    values: list[Any] | None = None
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Any]] = field(default_factory=dict)
    closed: list[tuple[set[str], list[str]]] = field(
        default_factory=list
    )  # names and patterns that are allowed
    prefix: dict[int, list[Any]] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)  # of arrays without a prefix
    low: dict[str, float] = field(default_factory=dict)  # by keyword of a lower limit: the largest
    high: dict[str, float] = field(default_factory=dict)
    patterns: list[str] = field(default_factory=list)
    choices: list[list[Any]] = field(default_factory=list)  # of each anyOf
    is_false: bool = False


# Keywords whose meaning does not depend on those beside them.
_ALONE = (
    NUMBER_KEYWORDS
    | STRING_KEYWORDS
    | {"$ref", "const", "enum", "required", "minItems", "maxItems", "minProperties", "maxProperties"}
)
_COUNTED = ("properties", "required", "patternProperties", "prefixItems", "enum")
_LOWS = {
    "minLength": "maxLength",
    "minItems": "maxItems",
    "minProperties": "maxProperties",
    "minimum": "maximum",
}


class Prover:
    """Searches contradictions, a limited number of steps; what it does not find may exist."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._num_calls = 0
        self._num_steps = 0

    def is_unsatisfiable(self, *schemas: Any) -> bool:
        self._num_calls = 0
        return self._is_empty(list(schemas), 0)

    def kinds(self, *schemas: Any) -> frozenset[str]:
        """Kinds of values that may satisfy all of them."""
        self._num_calls = 0
        return self._kinds(schemas, 0)

    def _kinds(self, schemas: Sequence[Any], depth: int) -> frozenset[str]:
        self._num_calls += 1
        facts = _Facts()
        for schema in schemas:
            self._collect(schema, facts, 0)
        if facts.is_false:
            return frozenset()
        kinds = facts.kinds
        if facts.values is not None:
            kinds &= {kind_of(value) for value in facts.values}
        if depth < _MAX_DEPTH and self._num_calls < _MAX_CALLS:
            for choice in facts.choices:
                kinds &= frozenset().union(*(self._kinds([branch], depth + 1) for branch in choice))
        return kinds

    def _is_empty(self, schemas: list[Any], depth: int) -> bool:
        self._num_calls += 1
        if depth > _MAX_DEPTH or self._num_calls > _MAX_CALLS:
            return False
        facts = _Facts()
        for schema in schemas:
            self._collect(schema, facts, depth)
        if facts.is_false:
            return True
        if facts.values is not None:
            empty = all(self._excludes(facts, value, depth) for value in facts.values)
        else:
            empty = all(self._has_none(facts, kind, depth) for kind in facts.kinds)
        return empty or any(
            all(self._is_empty([*schemas, branch], depth + 2) for branch in choice)
            for choice in facts.choices
        )

    def _collect(self, schema: Any, facts: _Facts, depth: int) -> None:
        if schema is False:
            facts.is_false = True
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return
        self.spend(4 + len(schema))
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema:
                self._collect(self._document.resolve(schema, keyword), facts, depth + 1)
        for entry in _schemas(schema.get("allOf")):
            self._collect(entry, facts, depth + 1)
        if "type" in schema:
            facts.kinds &= kinds_of_type(schema["type"])
        for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if isinstance(values, list):
                known = {json_key(value) for value in values}
                old = values if facts.values is None else facts.values
                facts.values = [value for value in old if json_key(value) in known]
        for keyword in ("anyOf", "oneOf"):
            if choices := _schemas(schema.get(keyword)):
                facts.choices.append(choices)
        self._collect_parts(schema, facts)

    def _collect_parts(self, schema: dict[str, Any], facts: _Facts) -> None:
        facts.required |= {name for name in schema.get("required") or () if isinstance(name, str)}
        self.spend(sum(len(schema[name]) for name in _COUNTED if isinstance(schema.get(name), dict | list)))
        properties = schema.get("properties") if isinstance(schema.get("properties"), dict) else {}
        for name, entry in (properties or {}).items():
            facts.properties.setdefault(name, []).append(entry)
        if schema.get("additionalProperties") is False:
            facts.closed.append((set(properties or {}), list(schema.get("patternProperties") or {})))
        prefix = schema.get("prefixItems", schema.get("items"))
        if isinstance(prefix, list):
            for index, entry in enumerate(prefix):
                facts.prefix.setdefault(index, []).append(entry)
        elif "items" in schema:
            facts.items.append(schema["items"])
        if isinstance(schema.get("pattern"), str):
            facts.patterns.append(schema["pattern"])
        for low, high in _LOWS.items():
            if _is_number(schema.get(low)):
                facts.low[low] = max(facts.low.get(low, float("-inf")), schema[low])
            if _is_number(schema.get(high)):
                facts.high[high] = min(facts.high.get(high, float("inf")), schema[high])
        for name, limits, pick in (
            ("exclusiveMinimum", facts.low, max),
            ("exclusiveMaximum", facts.high, min),
        ):
            if _is_number(schema.get(name)):
                limits[name] = pick(limits.get(name, schema[name]), schema[name])

    def spend(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise SchemaTooLarge(f"json_schema takes more than {MAX_STEPS} steps of proof")

    def _has_none(self, facts: _Facts, kind: str, depth: int) -> bool:
        """Whether no value of a kind satisfies the facts."""
        infinity = float("inf")

        def is_crossed(low: str) -> bool:
            return facts.low.get(low, -infinity) > facts.high.get(_LOWS[low], infinity)

        if kind in ("integer", "fraction"):
            low = max(facts.low.get("minimum", -infinity), facts.low.get("exclusiveMinimum", -infinity))
            high = min(facts.high.get("maximum", infinity), facts.high.get("exclusiveMaximum", infinity))
            is_open = low == facts.low.get("exclusiveMinimum") or high == facts.high.get("exclusiveMaximum")
            return low > high or (low == high and is_open)
        if kind == "string":
            return is_crossed("minLength")
        if kind == "array":
            count = int(facts.low.get("minItems", 0))
            return is_crossed("minItems") or any(
                index < count and self._is_empty(entries, depth + 1)
                for index, entries in facts.prefix.items()
            )
        if kind == "object":
            return is_crossed("minProperties") or any(
                self._is_empty(self._property(facts, name), depth + 1) for name in sorted(facts.required)
            )
        return False

    def _property(self, facts: _Facts, name: str) -> list[Any]:
        is_closed = any(name not in names and not patterns for names, patterns in facts.closed)
        return [*facts.properties.get(name, ()), *([False] if is_closed else ())]

    def _excludes(self, facts: _Facts, value: Any, depth: int) -> bool:
        """Whether a value contradicts the facts."""
        kind = kind_of(value)
        if kind not in facts.kinds:
            return True
        low, high = facts.low, facts.high
        infinity = float("inf")
        if kind in ("integer", "fraction"):
            return bool(
                value < low.get("minimum", -infinity)
                or value <= low.get("exclusiveMinimum", -infinity)
                or value > high.get("maximum", infinity)
                or value >= high.get("exclusiveMaximum", infinity)
            )
        if kind == "string":
            size = len(value)
            return (
                size < low.get("minLength", 0)
                or size > high.get("maxLength", infinity)
                or any(_mismatches(pattern, value) for pattern in facts.patterns)
            )
        if kind == "array":
            size = len(value)
            return size < low.get("minItems", 0) or size > high.get("maxItems", infinity)
        if kind == "object":
            return bool(facts.required - set(value)) or any(
                self._is_empty([{"const": entry}, *self._property(facts, name)], depth + 1)
                for name, entry in value.items()
            )
        return False

    def known(self, *schemas: Any) -> Known:
        """What is known of values that satisfy all of them."""
        facts = _Facts()
        for schema in schemas:
            self._collect(schema, facts, 0)
        closed = [names for names, patterns in facts.closed if not patterns]
        names = frozenset(set.intersection(*closed)) if closed else None
        return Known(self.kinds(*schemas), names, tuple(facts.items), facts.properties)

    def implies(self, schema: Any, other: Any, depth: int = 0) -> bool:
        """Whether all that satisfies a schema was found to satisfy the other."""
        if other is True or schema is False or json_key(schema) == json_key(other):
            return True
        if depth > _MAX_DEPTH or not isinstance(schema, dict) or not isinstance(other, dict):
            return False
        self.spend(len(schema) + len(other))
        words = {name for name in schema if name not in ANNOTATIONS}
        if words == {"$ref"} and "$ref" not in other:
            return self.implies(self._document.resolve(schema), other, depth + 1)
        if words <= {"type", "anyOf"} and "anyOf" in words:
            return all(self.implies(branch, other, depth + 1) for branch in _schemas(schema["anyOf"]))
        return all(
            self._implies_keyword(schema, name, value, depth)
            for name, value in other.items()
            if name not in ANNOTATIONS
        )

    def _implies_keyword(self, schema: dict[str, Any], name: str, value: Any, depth: int) -> bool:
        if name == "type":
            return self.kinds(schema) <= kinds_of_type(value)
        if name == "items" and "prefixItems" not in schema:
            return "items" in schema and self.implies(schema["items"], value, depth + 1)
        if name == "anyOf":
            return any(self.implies(schema, branch, depth + 1) for branch in _schemas(value))
        is_alone = name in _ALONE and name in schema
        return is_alone and json_key(schema[name]) == json_key(value)

    def negation(self, schema: Any, known: Known = _ANY_VALUE, depth: int = 0) -> Any:
        """A schema of those values that do not satisfy `schema`, among those of which `known` holds.

        CannotNegate names a keyword for which there is none.
        """
        if schema is True:
            return False
        if schema is False:
            return True
        if depth > _MAX_DEPTH:
            raise CannotNegate("$ref")
        self.spend(len(schema))
        found: list[Any] = []
        for keyword, value in schema.items():
            if keyword not in ANNOTATIONS and not is_trivial(keyword, known.kinds):
                found.append(self._negated(keyword, value, schema, known, depth))
        found = [entry for entry in found if entry is not False]
        if not found:
            return False
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _negated(self, keyword: str, value: Any, schema: dict[str, Any], known: Known, depth: int) -> Any:
        within = known.kinds
        match keyword:
            case "type":
                kinds = within - kinds_of_type(value)
                if "fraction" in kinds and "integer" not in kinds and "integer" in within:
                    raise CannotNegate("type")
                return {"type": type_of_kinds(kinds)} if kinds else False
            case "const":
                return _other_values([value], within)
            case "enum":
                return _other_values(value, within)
            case "not":
                return value
            case "allOf":
                return {"anyOf": [self.negation(entry, known, depth + 1) for entry in value]}
            case "anyOf":
                return {"allOf": [self.negation(entry, known, depth + 1) for entry in value]}
            case "oneOf" if len(value) <= 16 and all(
                self.is_unsatisfiable(first, second) for first, second in combinations(value, 2)
            ):
                return {"allOf": [self.negation(entry, known, depth + 1) for entry in value]}
            case "$ref":
                return self.negation(self._document.resolve(schema), known, depth + 1)
            case "required":
                absent = [{"type": "object", "properties": {name: False}} for name in value]
                return {"anyOf": absent} if absent else False
            case "properties":
                wrong: list[Any] = []
                for name, entry in value.items():
                    if known.names is not None and name not in known.names:
                        continue
                    inner = self.known(*known.properties[name]) if name in known.properties else _ANY_VALUE
                    negated = self.negation(entry, inner, depth + 1)
                    if negated is not False:
                        wrong.append({"type": "object", "required": [name], "properties": {name: negated}})
                return {"anyOf": wrong} if wrong else False
            case "items" if (
                known.items and "prefixItems" not in schema and self.is_unsatisfiable(value, *known.items)
            ):
                return {"type": "array", "minItems": 1}
            case "additionalProperties" if known.names is not None and not schema.get("patternProperties"):
                others = known.names - set(schema.get("properties", ()))
                negated = self.negation(value, _ANY_VALUE, depth + 1)
                if negated is False or not others:
                    return False
                return {
                    "anyOf": [
                        {"type": "object", "required": [name], "properties": {name: negated}}
                        for name in sorted(others)
                    ]
                }
            case "minimum":
                return {"type": "number", "exclusiveMaximum": value}
            case "maximum":
                return {"type": "number", "exclusiveMinimum": value}
            case "exclusiveMinimum" if _is_number(value):
                return {"type": "number", "maximum": value}
            case "exclusiveMaximum" if _is_number(value):
                return {"type": "number", "minimum": value}
            case "minLength" | "minItems" | "minProperties":
                if value <= 0:
                    return False
                kind = {"minLength": "string", "minItems": "array", "minProperties": "object"}[keyword]
                return {"type": kind, keyword.replace("min", "max"): value - 1}
            case "maxLength" | "maxItems" | "maxProperties":
                kind = {"maxLength": "string", "maxItems": "array", "maxProperties": "object"}[keyword]
                return {"type": kind, keyword.replace("max", "min"): value + 1}
        if keyword in _KNOWN:
            raise CannotNegate(keyword)
        return False  # an annotation


_KNOWN = (
    NUMBER_KEYWORDS
    | STRING_KEYWORDS
    | ARRAY_KEYWORDS
    | OBJECT_KEYWORDS
    | {"oneOf", "if", "then", "else", "$dynamicRef", "$recursiveRef"}
)


def _other_values(values: list[Any], within: frozenset[str]) -> Any:
    """A schema of everything but these values."""
    of: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for value in values:
        of[kind_of(value)].append(value)
    choices: list[Any] = []
    free = {kind for kind in within & {"null", "array", "object", "string"} if not of[kind]}
    if free:
        choices.append({"type": sorted(free)})
    if "boolean" in within:
        choices += [{"const": value} for value in (True, False) if value not in of["boolean"]]
    if "string" in within and of["string"]:
        choices.append({"type": "string", "pattern": pattern_without(of["string"])})
    if of["array"] and "array" in within:
        if any(of["array"]):
            raise CannotNegate("const")
        choices.append({"type": "array", "minItems": 1})
    if of["object"] and "object" in within:
        if any(of["object"]):
            raise CannotNegate("const")
        choices.append({"type": "object", "minProperties": 1})
    if within & {"integer", "fraction"}:
        kind = "number" if "fraction" in within else "integer"
        points = sorted({*of["integer"], *of["fraction"]})
        edges: list[tuple[Any, Any]] = list(pairwise([None, *points, None]))
        for low, high in edges:
            piece: dict[str, Any] = {"type": kind}
            if low is not None:
                piece["exclusiveMinimum"] = low
            if high is not None:
                piece["exclusiveMaximum"] = high
            if not (kind == "integer" and low is not None and high is not None and high - low <= 1):
                choices.append(piece)
    return {"anyOf": choices} if choices else False


def _mismatches(pattern: str, text: str) -> bool:
    """Whether a pattern is not in a text; not asked where Python's search might take long."""
    if len(text) > _MAX_TEXT or len(pattern) > _MAX_TEXT or _REPEATED_GROUP.search(pattern):
        return False
    if len(_UNBOUNDED.findall(pattern)) > 2:
        return False
    try:
        return not re.search(pattern, text)
    except (re.error, RecursionError):
        return False


def _schemas(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
