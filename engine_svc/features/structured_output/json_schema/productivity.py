"""Schemas without a finite value, such as an object that needs itself, taken out of a rewritten document.

A least fixed point: at first no kind of value is known of any conjunction of schemas, and a kind is added
when finite values of it follow from kinds already known. A kind that is never added has no finite value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from engine_svc.features.structured_output.json_schema.logic import (
    ARRAY_KEYWORDS,
    KINDS,
    NUMBER_KEYWORDS,
    OBJECT_KEYWORDS,
    json_key,
    kind_of,
    kinds_of_type,
    type_of_kinds,
)
from engine_svc.features.structured_output.json_schema.numbers import Numbers
from engine_svc.features.structured_output.json_schema.shapes import is_nothing, text_shape

MAX_STATES = 20_000  # conjunctions that are evaluated; later ones are taken to have values
MAX_TEXTS = 32  # combinations of patterns and lengths that are compared; 10 ms each
MAX_SIZE = 16  # of a length beside them
_OF_TEXTS = ("pattern", "minLength", "maxLength")
_KEYWORDS_OF = {"object": OBJECT_KEYWORDS, "array": ARRAY_KEYWORDS}
_LIMITS = OBJECT_KEYWORDS | ARRAY_KEYWORDS | NUMBER_KEYWORDS | frozenset(_OF_TEXTS)
_State = frozenset[int]  # the identities of conjoined schemas


def without_endless(root: dict[str, Any], definitions: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The schema and the definitions without parts that no finite value satisfies; False if it has none."""
    if not definitions:
        return root, definitions
    values = _FiniteValues(definitions)
    pruned = {name: values.pruned(entry) for name, entry in definitions.items()}
    return values.pruned(root), pruned


def _target(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).removeprefix("#/$defs/")


class _FiniteValues:
    """The kinds of finite values of conjunctions; some that have none may be named, none is missed."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions
        self._schemas: dict[int, Any] = {}  # by identity
        self._limits: dict[int, dict[str, Any]] = {}  # by identity of the schema
        self._constants: dict[str, dict[str, Any]] = {}
        self._kinds: dict[_State, frozenset[str]] = {}
        self._parents: dict[_State, set[_State]] = {}
        self._texts: dict[str, bool] = {}  # whether there are some, by their limits
        self._open: list[_State] = []
        self._current: _State | None = None

    def kinds(self, schema: Any) -> frozenset[str]:
        """Kinds of a schema's finite values."""
        self._current = None
        self._known([schema])
        while self._open:
            self._current = state = self._open.pop()
            kinds = self._evaluated(state)
            if kinds != self._kinds[state]:
                self._kinds[state] = kinds
                self._open.extend(self._parents[state])
        self._current = None
        return self._known([schema])

    def pruned(self, schema: Any) -> Any:
        """The schema without parts that have no finite value."""
        if isinstance(schema, bool):
            return schema
        kinds = self.kinds(schema)
        if not kinds:
            return False
        own = _own_kinds(schema)
        lost = {
            kind
            for kind in _KEYWORDS_OF.keys() & (own - kinds)
            if schema.keys() & (_KEYWORDS_OF[kind] | {"allOf"}) and "$ref" not in schema
        }
        left: dict[str, Any] = {}
        for name, value in schema.items():
            if any(name in _KEYWORDS_OF[kind] for kind in lost):
                continue
            if name in ("properties", "patternProperties"):
                left[name] = {key: self.pruned(entry) for key, entry in value.items()}
            elif name == "anyOf":
                left[name] = [entry for entry in map(self.pruned, value) if entry is not False]
            elif name in ("allOf", "prefixItems"):
                left[name] = [*map(self.pruned, value)]
            else:
                left[name] = self.pruned(value) if name in ("items", "additionalProperties") else value
        return left | {"type": type_of_kinds(own - lost)} if lost else left

    def _known(self, schemas: Iterable[Any]) -> frozenset[str]:
        """The kinds known so far; the state that is being evaluated comes again when there are more."""
        by_id = {id(schema): schema for schema in schemas}
        state = frozenset(by_id)
        if state not in self._kinds:
            if len(self._kinds) >= MAX_STATES:
                return KINDS
            self._schemas |= by_id
            self._kinds[state], self._parents[state] = frozenset(), set()
            self._open.append(state)
        if self._current is not None:
            self._parents[state].add(self._current)
        return self._kinds[state]

    def _has_value(self, schemas: list[Any]) -> bool:
        return not schemas or bool(self._known(schemas))

    def _evaluated(self, state: _State) -> frozenset[str]:
        conjuncts: list[dict[str, Any]] = []
        if not all(self._join(self._schemas[number], conjuncts, set()) for number in sorted(state)):
            return frozenset()
        kinds = KINDS.intersection(*map(_own_kinds, conjuncts)) - _empty_kinds(conjuncts)
        if "object" in kinds and not self._has_object(conjuncts):
            kinds -= {"object"}
        if "array" in kinds and not self._has_array(conjuncts):
            kinds -= {"array"}
        if "string" in kinds and not self._has_text(conjuncts):
            kinds -= {"string"}
        for schema in conjuncts:
            if "enum" in schema or "const" in schema:
                kinds &= {kind_of(value) for value in _values(schema) if self._may_be(value, conjuncts)}
        limits = [limit for schema in conjuncts if (limit := self._limits_of(schema))]
        for schema in conjuncts:
            if "anyOf" in schema:
                branches = [self._known([branch, *limits]) for branch in schema["anyOf"]]
                kinds &= frozenset().union(*branches)
        return kinds

    def _join(self, schema: Any, conjuncts: list[dict[str, Any]], names: set[str]) -> bool:
        """Collect a schema, the targets of its references in place and its `allOf`; False if one is false."""
        if isinstance(schema, bool):
            return schema
        conjuncts.append(schema)
        joined = list(schema.get("allOf", ()))
        if "$ref" in schema and _target(schema) not in names:
            names.add(_target(schema))
            joined.append(self._definitions[_target(schema)])
        return all(self._join(entry, conjuncts, names) for entry in joined)

    def _limits_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The keywords of the schema that limit values of a kind, the same object each time."""
        if id(schema) not in self._limits:
            self._limits[id(schema)] = {name: schema[name] for name in schema if name in _LIMITS}
            self._schemas[id(schema)] = schema  # kept, as it is known by identity
        return self._limits[id(schema)]

    def _may_be(self, value: Any, conjuncts: list[dict[str, Any]]) -> bool:
        """Whether the parts of a value may satisfy what the schemas say of them."""
        if isinstance(value, list):
            parts = [
                (part, [entry for schema in conjuncts for entry in _of_index(schema, index)])
                for index, part in enumerate(value)
            ]
        elif isinstance(value, dict):
            parts = [
                (part, [entry for schema in conjuncts for entry in _of_name(schema, name)])
                for name, part in value.items()
            ]
        else:
            return True
        return all(not entries or self._has_value([self._only(part), *entries]) for part, entries in parts)

    def _only(self, value: Any) -> dict[str, Any]:
        """The schema of one value, the same object each time."""
        return self._constants.setdefault(json_key(value), {"const": value})

    def _has_object(self, conjuncts: list[dict[str, Any]]) -> bool:
        for name in dict.fromkeys(name for schema in conjuncts for name in schema.get("required", ())):
            if not self._has_value([entry for schema in conjuncts for entry in _of_name(schema, name)]):
                return False
        min_properties = max(schema.get("minProperties", 0) for schema in conjuncts) if conjuncts else 0
        if min_properties == 0:
            return True
        others = [schema["additionalProperties"] for schema in conjuncts if "additionalProperties" in schema]
        patterns = [entry for schema in conjuncts for entry in schema.get("patternProperties", {}).values()]
        if self._has_value(others) or any(self._has_value([entry]) for entry in patterns):
            return True
        names = dict.fromkeys(name for schema in conjuncts for name in schema.get("properties", ()))
        possible = [
            name
            for name in names
            if self._has_value([entry for schema in conjuncts for entry in _of_name(schema, name)])
        ]
        return len(possible) >= min_properties

    def _has_text(self, conjuncts: list[dict[str, Any]]) -> bool:
        texts = [{name: schema[name] for name in _OF_TEXTS if name in schema} for schema in conjuncts]
        limits = [limit for schema in texts for name, limit in schema.items() if name != "pattern"]
        if (
            len(limits) + sum("pattern" in schema for schema in texts) < 2
            or max(limits, default=0) > MAX_SIZE
        ):
            return True
        key = repr(texts)
        if key not in self._texts:
            if len(self._texts) >= MAX_TEXTS:
                return True
            self._texts[key] = not is_nothing(text_shape(texts))
        return self._texts[key]

    def _has_array(self, conjuncts: list[dict[str, Any]]) -> bool:
        min_items = max((schema.get("minItems", 0) for schema in conjuncts), default=0)
        if any(min_items > schema.get("maxItems", min_items) for schema in conjuncts):
            return False
        contained = [schema["contains"] for schema in conjuncts if "contains" in schema]
        if not all(self._has_value([entry]) for entry in contained):
            return False
        longest = max((len(schema.get("prefixItems", ())) for schema in conjuncts), default=0)
        return all(
            self._has_value([entry for schema in conjuncts for entry in _of_index(schema, index)])
            for index in range(min(min_items, longest + 1))
        )


def _empty_kinds(conjuncts: list[dict[str, Any]]) -> set[str]:
    """Kinds without a value between bounds of numbers and lengths."""
    low = max((schema.get("minLength", 0) for schema in conjuncts), default=0)
    kinds = {"string"} if any(low > schema.get("maxLength", low) for schema in conjuncts) else set()
    numbers = Numbers()
    for schema in conjuncts:
        if schema.keys() & NUMBER_KEYWORDS:
            numbers &= Numbers.of(schema, is_integer=False)
    if numbers.is_empty or numbers.is_whole:
        kinds.add("fraction")
    if (numbers & Numbers(is_integer=True)).is_empty:
        kinds.add("integer")
    return kinds


def _own_kinds(schema: dict[str, Any]) -> frozenset[str]:
    kinds = kinds_of_type(schema["type"]) if "type" in schema else KINDS
    if "enum" in schema or "const" in schema:
        kinds &= {kind_of(value) for value in _values(schema)}
    return kinds


def _values(schema: dict[str, Any]) -> list[Any]:
    return [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]


def _of_name(schema: dict[str, Any], name: str) -> list[Any]:
    """Schemas of a property."""
    entries = [schema["properties"][name]] if name in schema.get("properties", {}) else []
    for pattern, entry in schema.get("patternProperties", {}).items():
        try:
            if re.search(pattern.replace("$", r"\Z"), name):
                entries.append(entry)
        except re.error:
            return []
    if not entries and "additionalProperties" in schema:
        entries.append(schema["additionalProperties"])
    return entries


def _of_index(schema: dict[str, Any], index: int) -> list[Any]:
    """Schemas of an item."""
    prefix = schema.get("prefixItems", ())
    if index < len(prefix):
        return [prefix[index]]
    return [schema["items"]] if "items" in schema else []
