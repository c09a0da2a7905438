"""Whether a value satisfies a schema, and which values a schema with `enum` or `const` leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from engine_svc.features.structured_output.json_schema.logic import (
    ANNOTATIONS,
    ASSERTIONS,
    Prover,
    is_found,
    is_trivial,
    json_key,
    kind_of,
    kinds_of_type,
)

MAX_VALUES = 32  # that are looked at
MAX_DEPTH = 60
_LIMITS = {
    "allOf", "oneOf", "not", "if", "contains", "uniqueItems", "patternProperties", "propertyNames",
    "dependentSchemas",
}  # fmt: skip


def values_left(prover: Prover, schema: dict[str, Any]) -> list[Any] | None:
    """All values of a schema; None if they are not few or not known, or if backends enforce it as it is."""
    if not schema.keys() & _LIMITS:
        return None
    values = _candidates(prover, schema, 0)
    if values is None or len(values) > MAX_VALUES:
        return None
    left = []
    for value in values:
        match satisfies(prover, value, schema):
            case None:
                return None
            case True:
                left.append(value)
    return left


def _candidates(prover: Prover, schema: Any, depth: int) -> list[Any] | None:
    """Values among which are all of the schema; None if they are not listed anywhere."""
    if schema is False:
        return []
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    prover.spend(4 + len(schema))
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return list(schema["enum"])
    joined = [*schema.get("allOf", ()), *_targets(prover, schema)]
    for entry in joined:
        if (values := _candidates(prover, entry, depth + 1)) is not None:
            return values
    for keyword in ("anyOf", "oneOf"):
        if (branches := schema.get(keyword)) is None:
            continue
        every: dict[str, Any] = {}
        for entry in branches:
            if (values := _candidates(prover, entry, depth + 1)) is None:
                break
            every |= {json_key(value): value for value in values}
        else:
            return list(every.values())
    return None


def _targets(prover: Prover, schema: dict[str, Any]) -> Iterator[Any]:
    for keyword in ("$ref", "$dynamicRef"):
        if keyword in schema:
            yield prover.document.resolve(schema, keyword)


def satisfies(prover: Prover, value: Any, schema: Any, depth: int = 0) -> bool | None:
    """None if it is not known."""
    if isinstance(schema, bool):
        return schema
    if depth > MAX_DEPTH:
        return None
    prover.spend(4 + len(schema))
    return _all(
        _Check(prover, value, schema, depth).keyword(name)
        for name in schema
        if name not in ANNOTATIONS and not is_trivial(name, frozenset({kind_of(value)}))
    )


def _all(results: Iterable[bool | None]) -> bool | None:
    is_known = True
    for result in results:
        if result is False:
            return False
        is_known = is_known and result is not None
    return True if is_known else None


def _not(result: bool | None) -> bool | None:
    return None if result is None else not result


def _any(results: Iterable[bool | None]) -> bool | None:
    return _not(_all(map(_not, results)))


def _is_count_within(results: Iterable[bool | None], low: int, high: int | None) -> bool | None:
    found = list(results)
    if None in found:
        return None
    count = found.count(True)
    return low <= count and (high is None or count <= high)


class _Check:
    """A value under the keywords of a schema, one by one."""

    def __init__(self, prover: Prover, value: Any, schema: dict[str, Any], depth: int) -> None:
        self._prover, self._value, self._schema, self._depth = prover, value, schema, depth

    def _inner(self, value: Any, schema: Any) -> bool | None:
        return satisfies(self._prover, value, schema, self._depth + 1)

    def keyword(self, keyword: str) -> bool | None:
        value, entry = self._value, self._schema[keyword]
        match keyword:
            case "type":
                return kind_of(value) in kinds_of_type(entry)
            case "const":
                return json_key(value) == json_key(entry)
            case "enum":
                return json_key(value) in map(json_key, entry)
            case "allOf":
                return _all(self._inner(value, one) for one in entry)
            case "anyOf":
                return _any(self._inner(value, one) for one in entry)
            case "oneOf":
                return _is_count_within((self._inner(value, one) for one in entry), 1, 1)
            case "not":
                return _not(self._inner(value, entry))
            case "if":
                condition = self._inner(value, entry)
                if condition is None:
                    return None
                return self._inner(value, self._schema.get("then" if condition else "else", True))
            case "then" | "else":
                return True
            case "$ref" | "$dynamicRef":
                return self._inner(value, self._prover.document.resolve(self._schema, keyword))
            case "minimum":
                return bool(value >= entry)
            case "maximum":
                return bool(value <= entry)
            case "exclusiveMinimum":
                return bool(value > entry)
            case "exclusiveMaximum":
                return bool(value < entry)
            case "multipleOf":
                return Fraction(value) % Fraction(entry) == 0
            case "minLength" | "minItems" | "minProperties":
                return bool(len(value) >= entry)
            case "maxLength" | "maxItems" | "maxProperties":
                return bool(len(value) <= entry)
            case "pattern":
                return is_found(entry, value)
        if isinstance(value, list):
            return self._of_array(keyword, entry)
        if isinstance(value, dict):
            return self._of_object(keyword, entry)
        return None if keyword in ASSERTIONS else True

    def _of_array(self, keyword: str, entry: Any) -> bool | None:
        value = self._value
        match keyword:
            case "prefixItems":
                return _all(map(self._inner, value, entry))
            case "items":
                return _all(
                    self._inner(item, entry) for item in value[len(self._schema.get("prefixItems", ())) :]
                )
            case "contains":
                low, high = self._schema.get("minContains", 1), self._schema.get("maxContains")
                return _is_count_within((self._inner(item, entry) for item in value), low, high)
            case "minContains" | "maxContains":
                return True
            case "uniqueItems":
                keys = list(map(json_key, value))
                return not entry or len(set(keys)) == len(keys)
        return None if keyword in ASSERTIONS else True

    def _of_object(self, keyword: str, entry: Any) -> bool | None:
        value = self._value
        match keyword:
            case "required":
                return bool(set(entry) <= value.keys())
            case "properties":
                return _all(self._inner(value[name], one) for name, one in entry.items() if name in value)
            case "patternProperties":
                return _all(
                    _any((_not(is_found(pattern, name)), self._inner(one, schema)))
                    for pattern, schema in entry.items()
                    for name, one in value.items()
                )
            case "additionalProperties":
                patterns = self._schema.get("patternProperties", ())
                return _all(
                    _any((*(is_found(pattern, name) for pattern in patterns), self._inner(one, entry)))
                    for name, one in value.items()
                    if name not in self._schema.get("properties", ())
                )
            case "propertyNames":
                return _all(self._inner(name, entry) for name in value)
            case "dependentRequired":
                return all(value.keys() >= set(names) for name, names in entry.items() if name in value)
            case "dependentSchemas":
                return _all(self._inner(value, one) for name, one in entry.items() if name in value)
        return None if keyword in ASSERTIONS else True
