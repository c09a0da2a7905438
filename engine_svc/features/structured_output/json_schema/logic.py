"""Proofs about schemas: that no value satisfies several, or that one implies another."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import Any

from engine_svc.features.structured_output.json_schema.document import (
    SchemaDocument,
    SchemaTooLarge,
)
from engine_svc.features.structured_output.json_schema.languages import STEPS, Texts, pattern_of
from engine_svc.features.structured_output.json_schema.numbers import (
    MAX_DIGITS,
    Numbers,
    is_number,
)
from engine_svc.features.structured_output.json_schema.patterns import UnsupportedPattern, translated

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
_EXACT = Context(prec=2 * MAX_DIGITS)
MAX_DEPTH = 8  # of a proof: joins, parts of values, and branches
_MAX_CALLS = 2_000  # of one proof
MAX_STEPS = 400_000  # of all proofs and searches for a document: parts of schemas looked at; about 2 us each
_MAX_TEXT = 200
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_UNBOUNDED = re.compile(r"[*+{]")
# Keywords by the kind of values that they limit; values of other kinds satisfy them.
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
# Keywords that some values do not satisfy, or that may lead to such.
ASSERTIONS = (
    NUMBER_KEYWORDS
    | STRING_KEYWORDS
    | ARRAY_KEYWORDS
    | OBJECT_KEYWORDS
    | {"oneOf", "if", "then", "else", "$dynamicRef", "$recursiveRef"}
)


def kinds_of_type(value: Any) -> frozenset[str]:
    names = value if isinstance(value, list) else [value]
    kinds = [{"integer", "fraction"} if name == "number" else {name} for name in names]
    return frozenset().union(*kinds)


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
    if isinstance(value, int):
        return "integer"
    if isinstance(value, Decimal):
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
    if isinstance(value, Decimal):
        return str(value.normalize(_EXACT))
    if isinstance(value, list):
        return "[" + ",".join(map(json_key, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{json_key(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)


@dataclass(frozen=True, slots=True)
class Known:
    """Knowledge of the values among which a schema is negated."""

    kinds: frozenset[str] = KINDS
    names: frozenset[str] | None = None  # the only properties that objects have; None: any
    items: tuple[Any, ...] = ()  # schemas of all items of arrays
    properties: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # schemas of each


ANY_VALUE = Known()


@dataclass(frozen=True, slots=True)
class _Others:
    """`patternProperties`, and `additionalProperties` beside `names`."""

    names: set[str]
    patterns: dict[str, Any]
    schema: Any

    def schemas(self, name: str) -> list[Any]:
        found = [is_found(pattern, name) for pattern in self.patterns]
        schemas = [entry for entry, is_one in zip(self.patterns.values(), found, strict=True) if is_one]
        is_other = name not in self.names and all(is_one is False for is_one in found)
        return [*schemas, self.schema] if is_other else schemas


@dataclass(slots=True)
class _Facts:
    """The parts of several schemas, by keyword. A value of all the schemas satisfies all parts."""

    kinds: frozenset[str] = KINDS
    values: list[Any] | None = None  # that `const` and `enum` leave
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Any]] = field(default_factory=dict)
    others: list[_Others] = field(default_factory=list)
    prefix_items: dict[int, list[Any]] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)  # of arrays without a prefix
    contained: list[Any] = field(default_factory=list)  # schemas of an item that each has
    numbers: Numbers = field(default_factory=Numbers)
    lows: dict[str, float] = field(default_factory=dict)  # largest lower limit of a size, by keyword
    highs: dict[str, float] = field(default_factory=dict)  # smallest upper limit
    patterns: list[str] = field(default_factory=list)
    choices: list[list[Any]] = field(default_factory=list)  # branches of each `anyOf` and `oneOf`
    is_false: bool = False

    def low(self, keyword: str) -> float:
        return self.lows.get(keyword, -math.inf)

    def high(self, keyword: str) -> float:
        return self.highs.get(keyword, math.inf)

    def property(self, name: str) -> list[Any]:
        """Schemas of a property."""
        of_others = [entry for others in self.others for entry in others.schemas(name)]
        return [*self.properties.get(name, ()), *of_others]


# Keywords whose meaning does not depend on those beside them.
_ALONE = (
    NUMBER_KEYWORDS
    | STRING_KEYWORDS
    | {"$ref", "const", "enum", "required", "minItems", "maxItems", "minProperties", "maxProperties"}
)
_COUNTED = ("properties", "required", "patternProperties", "prefixItems", "enum")
_LOWS = ("minLength", "minItems", "minProperties")
_HIGHS = ("maxLength", "maxItems", "maxProperties")


class Prover:
    """Searches contradictions in a limited number of steps. One that it misses may exist."""

    def __init__(self, document: SchemaDocument) -> None:
        self.document = document
        self._num_calls = 0
        self._num_steps = 0
        self._sets: set[Texts] = set()  # of which a pattern was written

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
        if depth < MAX_DEPTH and self._num_calls < _MAX_CALLS:
            for choice in facts.choices:
                kinds &= frozenset().union(*(self._kinds([branch], depth + 1) for branch in choice))
        return kinds

    def _is_empty(self, schemas: list[Any], depth: int) -> bool:
        self._num_calls += 1
        if depth > MAX_DEPTH or self._num_calls > _MAX_CALLS:
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
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return
        self.spend(4 + len(schema))
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema:
                self._collect(self.document.resolve(schema, keyword), facts, depth + 1)
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
        patterns = schema.get("patternProperties")
        if patterns or "additionalProperties" in schema:
            others = schema.get("additionalProperties", True)
            facts.others.append(_Others(set(properties or {}), dict(patterns or {}), others))
        prefix = schema.get("prefixItems", schema.get("items"))
        if isinstance(prefix, list):
            for index, entry in enumerate(prefix):
                facts.prefix_items.setdefault(index, []).append(entry)
        elif "items" in schema:
            facts.items.append(schema["items"])
        if "contains" in schema and schema.get("minContains", 1) > 0:
            facts.contained.append(schema["contains"])
        if isinstance(schema.get("pattern"), str):
            facts.patterns.append(schema["pattern"])
        numbers = {word: schema[word] for word in NUMBER_KEYWORDS if is_number(schema.get(word))}
        if numbers:
            facts.numbers &= Numbers.of(numbers, is_integer=False)
        for keyword in _LOWS:
            if is_number(schema.get(keyword)):
                facts.lows[keyword] = max(facts.low(keyword), schema[keyword])
        for keyword in _HIGHS:
            if is_number(schema.get(keyword)):
                facts.highs[keyword] = min(facts.high(keyword), schema[keyword])

    def pattern_of(self, texts: Texts) -> str | None:
        """A pattern of the texts; None if there are none. Raises UnsupportedPattern."""
        if texts not in self._sets:
            self._sets.add(texts)
            self.spend(STEPS)
        return pattern_of(texts)

    def spend(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise SchemaTooLarge(f"json_schema takes more than {MAX_STEPS} steps of proof")

    def _has_none(self, facts: _Facts, kind: str, depth: int) -> bool:
        """Whether no value of a kind satisfies the facts."""
        match kind:
            case "integer":
                return (facts.numbers & Numbers(is_integer=True)).is_empty
            case "fraction":
                return facts.numbers.is_empty or facts.numbers.is_whole
            case "string":
                return facts.low("minLength") > facts.high("maxLength")
            case "array":
                min_items = max(facts.lows.get("minItems", 0), bool(facts.contained))
                items = [] if facts.prefix_items else facts.items
                return (
                    min_items > facts.high("maxItems")
                    or any(
                        index < min_items and self._is_empty(entries, depth + 1)
                        for index, entries in facts.prefix_items.items()
                    )
                    or any(self._is_empty([entry, *items], depth + 1) for entry in facts.contained)
                )
            case "object":
                return facts.low("minProperties") > facts.high("maxProperties") or any(
                    self._is_empty(facts.property(name), depth + 1) for name in sorted(facts.required)
                )
        return False

    def _excludes(self, facts: _Facts, value: Any, depth: int) -> bool:
        """Whether a value contradicts the facts."""
        kind = kind_of(value)
        if kind not in facts.kinds:
            return True
        match kind:
            case "integer" | "fraction":
                return (facts.numbers & Numbers.only(value)).is_empty
            case "string":
                return not facts.low("minLength") <= len(value) <= facts.high("maxLength") or any(
                    is_found(pattern, value) is False for pattern in facts.patterns
                )
            case "array":
                return not facts.low("minItems") <= len(value) <= facts.high("maxItems")
            case "object":
                return bool(facts.required - set(value)) or any(
                    self._is_empty([{"const": entry}, *facts.property(name)], depth + 1)
                    for name, entry in value.items()
                )
        return False

    def known(self, *schemas: Any) -> Known:
        """Knowledge of values that satisfy all of the schemas."""
        facts = _Facts()
        for schema in schemas:
            self._collect(schema, facts, 0)
        closures = [one.names for one in facts.others if one.schema is False and not one.patterns]
        names = frozenset(set.intersection(*closures)) if closures else None
        return Known(self.kinds(*schemas), names, tuple(facts.items), facts.properties)

    def implies(self, schema: Any, other: Any, depth: int = 0) -> bool:
        """Whether a proof was found that values of a schema satisfy the other."""
        if other is True or schema is False or json_key(schema) == json_key(other):
            return True
        if depth > MAX_DEPTH or not isinstance(schema, dict) or not isinstance(other, dict):
            return False
        self.spend(len(schema) + len(other))
        words = {name for name in schema if name not in ANNOTATIONS}
        if words == {"$ref"} and "$ref" not in other:
            return self.implies(self.document.resolve(schema), other, depth + 1)
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


def is_found(pattern: str, text: str) -> bool | None:
    """Whether a pattern is in a text; None where Python's search might take long."""
    if len(text) > _MAX_TEXT or len(pattern) > _MAX_TEXT or _REPEATED_GROUP.search(pattern):
        return None
    if len(_UNBOUNDED.findall(pattern)) > 2:
        return None
    try:
        return bool(re.search(translated(pattern).replace("$", r"\Z"), text))
    except (re.error, RecursionError, UnsupportedPattern):
        return None


def _schemas(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
