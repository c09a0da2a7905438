"""Limits on the text of constraints, for work that the backends do not limit themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from engine_svc.features.structured_output.constraint import Constraint, GrammarError, GrammarTooComplex

_REGEX_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?:\d*,)?(\d+)\}|\{\d+,\}|.", re.DOTALL)

# Texts, regular expressions and comments of a Lark grammar.
_LARK_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')

# Keywords whose entries are schemas, whatever their names, and those whose values are none.
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_MAPS = frozenset({*SCHEMA_MAPS, "dependencies"})
_DATA = frozenset({"const", "enum", "default", "examples"})


def subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    """The values of a schema that may be schemas or lists of them: also a property called "const"."""
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            yield from value.values()
        elif name not in _DATA:
            yield value


def part_at(document: Any, reference: str) -> Any:
    """The part of the document that the reference names, None if there is none."""
    for key in reference.split("/")[1:]:
        name = unquote(key).replace("~1", "/").replace("~0", "~")
        if isinstance(document, list):
            document = dict(zip(map(str, range(len(document))), document, strict=True)).get(name)
        else:
            document = _dict(document).get(name)
    return document


def check_text(constraint: Constraint, *, max_bytes: int, max_nesting: int) -> None:
    name = constraint.kind.value
    texts = (constraint.text, *constraint.choices)
    size = sum(len(text.encode()) for text in texts)
    if size > max_bytes:
        raise GrammarTooComplex(f"{name} has {size} bytes, {max_bytes} are allowed")
    if any("\0" in text for text in texts):
        raise GrammarError(f"{name} contains a NUL character")
    depth = deepest = 0
    for character in constraint.text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > max_nesting:
        raise GrammarTooComplex(f"{name} is nested {deepest} levels deep, {max_nesting} are allowed")


def check_repetitions(pattern: str, name: str, max_parts: int) -> None:
    """Refuse nested counts like (a{1000}){1000}, which cost their product."""
    totals = [0]  # parts of each open group
    last = 0  # parts that a count would repeat
    for match in _REGEX_PARTS.finditer(pattern):
        part = match[0]
        if part == "(":
            totals.append(0)
        elif part == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif match[1]:
            repeated = last * int(match[1])
            totals[-1] += repeated - last
            last = repeated
        elif part not in "?*+|":
            last = 1
            totals[-1] += 1
        if totals[-1] > max_parts:
            raise GrammarTooComplex(f"{name} repeats {totals[-1]} parts, {max_parts} are allowed")


def check_intersections(grammar: str, max_conjoined: int) -> None:
    """Refuse many intersections of terminals, for the reason of `ConjoinedPatterns`."""
    count = 1 + _LARK_TEXTS.sub("", grammar).count("&")
    if count > max_conjoined:
        raise GrammarTooComplex(f"grammar intersects {count} terminals, {max_conjoined} are allowed")


class ConjoinedPatterns:
    """Limit on the number of different patterns of a schema that one text has to match.

    The work for one token is exponential in this number, and none of it is fuel.
    """

    def __init__(self, document: Any, *, max_conjoined: int, max_values: int) -> None:
        self._document = document
        self._max_conjoined = max_conjoined
        self._max_values = max_values
        self._open_refs: set[str] = set()
        self._num_cut = 0  # references back to an open one
        self._of_ref: dict[str, _Patterns] = {}  # where nothing was cut
        self._of_part: dict[int, _Patterns] = {}  # the same, by identity
        self._num_values = 0

    def check(self, schema: Any) -> None:
        """Raises GrammarTooComplex."""
        if isinstance(schema, dict):
            is_joined = "$ref" in schema and len(schema) > 1
            if is_joined or isinstance(schema.get("allOf"), list):
                self._check_one(self._patterns(schema))
        for part in schema.values() if isinstance(schema, dict) else schema:
            if isinstance(part, dict | list):
                self.check(part)

    def _patterns_at(self, reference: str) -> _Patterns:
        if reference in self._of_ref:
            return self._of_ref[reference]
        if reference in self._open_refs:
            self._num_cut += 1
            return {}
        if reference != "#" and not reference.startswith("#/"):
            # By an anchor or identifier, which frontends replace: it may be any part.
            return {(): frozenset(_patterns_in(self._document))}
        num_cut = self._num_cut
        self._open_refs.add(reference)
        patterns = self._patterns(part_at(self._document, reference))
        self._open_refs.remove(reference)
        if self._num_cut == num_cut:
            self._of_ref[reference] = patterns
        return patterns

    def _check_one(self, by_path: _Patterns) -> None:
        counts = {False: 0, True: 0}  # the largest, by whether the path has any names
        for path, patterns in by_path.items():
            is_any = _ANY_NAME in path
            counts[is_any] = max(counts[is_any], len(patterns))
        if (count := sum(counts.values())) > self._max_conjoined:
            raise GrammarTooComplex(
                f"allOf: {count} patterns for the same text, {self._max_conjoined} are allowed"
            )

    def _patterns(self, schema: Any) -> _Patterns:
        """The patterns by the path of the values that have to match them."""
        if id(schema) in self._of_part:
            return self._of_part[id(schema)]
        num_cut = self._num_cut
        patterns = self._joined_patterns(schema)
        if self._num_cut == num_cut:
            self._of_part[id(schema)] = patterns
        return patterns

    def _joined_patterns(self, schema: Any) -> _Patterns:
        self._num_values += 1
        if self._num_values > self._max_values:
            raise GrammarTooComplex(f"allOf: more than {self._max_values} values with patterns to compare")
        if not isinstance(schema, dict):
            return {}
        pattern = schema.get("pattern")
        patterns: _Patterns = {(): frozenset((pattern,))} if isinstance(pattern, str) else {}
        for part in _list(schema.get("allOf")):
            _join(patterns, self._patterns(part))
        reference = schema.get("$ref")
        if isinstance(reference, str):
            _join(patterns, self._patterns_at(reference))
        either: _Patterns = {}
        for name in ("anyOf", "oneOf"):
            for part in _list(schema.get(name)):
                for path, branch in self._patterns(part).items():
                    either[path] = max(either.get(path, frozenset()), branch, key=len)
        _join(patterns, either)
        for name in ("properties", "patternProperties"):
            for key, part in _dict(schema.get(name)).items():
                step = f".{key}" if name == "properties" else _ANY_NAME
                _join(patterns, self._patterns(part), step)
        for name in ("items", "additionalProperties", "contains"):
            _join(patterns, self._patterns(schema.get(name)), _ANY_NAME)
        for index, part in enumerate(_list(schema.get("prefixItems"))):
            _join(patterns, self._patterns(part), f"{index}")
        return patterns


_Patterns = dict[tuple[str, ...], frozenset[str]]
_ANY_NAME = "*"  # of values of several names or indices


def _join(patterns: _Patterns, more: _Patterns, *step: str) -> None:
    for path, added in more.items():
        patterns[step + path] = patterns.get(step + path, frozenset()) | added


def _patterns_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(value.get("pattern"), str):
        yield value["pattern"]
    for part in value.values() if isinstance(value, dict) else _list(value):
        yield from _patterns_in(part)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
