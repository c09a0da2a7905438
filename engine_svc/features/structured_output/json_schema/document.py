"""A schema document: its limits, and where its references lead."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from engine_svc.features.structured_output.json_schema.numbers import (
    NumberTooLong,
    exact,
    is_number,
    whole,
)
from engine_svc.features.structured_output.limits import SCHEMA_MAPS, subschemas
from triptych_kit.exact_json import dumps

MAX_DEPTH = 100  # of nested values
MAX_VALUES = 50_000

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = (
    "items", "additionalItems", "contains", "additionalProperties", "propertyNames", "not", "if", "then",
    "else", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip

COUNTS = frozenset(
    {
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
        "maxContains",
    }
)  # fmt: skip


class InvalidSchema(ValueError):
    """The document is no schema; the message names the place."""


class SchemaTooLarge(ValueError):
    """A limit was reached; the message names it."""


class SchemaDocument:
    def __init__(self, text: str, *, has_additional_properties: bool = True) -> None:
        self._is_open = has_additional_properties  # objects whose schema does not say
        try:
            self.root: Any = json.loads(text, parse_constant=_no_constant, parse_float=exact, parse_int=whole)
            dumps(self.root, ensure_ascii=False).encode()
        except RecursionError:
            raise SchemaTooLarge(f"json_schema is nested deeper than {MAX_DEPTH} levels") from None
        except NumberTooLong as error:
            raise SchemaTooLarge(f"json_schema: {error}") from None
        except ValueError as error:
            raise InvalidSchema(f"json_schema is not JSON: {error}") from None
        if not isinstance(self.root, dict | bool):
            raise InvalidSchema("json_schema is neither an object nor a bool")
        _check_size(self.root)
        self._by_uri: dict[str, Any] = {}
        self._base_of: dict[int, str] = {}
        self._old_base_of: dict[int, str] = {}  # of schemas with $id and $ref, where $id did not count
        self._dynamic: dict[str, int] = {}
        self._modern: set[int] = set()
        self._recursive: dict[int, bool] = {}
        self._copies: list[Any] = []  # kept, because schemas are known by identity
        dialect = self.root.get("$schema") if isinstance(self.root, dict) else None
        self._has_dialect = isinstance(dialect, str)
        self._is_old = isinstance(dialect, str) and "draft-0" in dialect  # where nothing counts beside $ref
        self._has_id = isinstance(dialect, str) and ("draft-03" in dialect or "draft-04" in dialect)
        self._index(self.root, "")
        self._modernise(self.root, "#")

    def resolve(self, node: dict[str, Any], keyword: str = "$ref") -> Any:
        """The schema that the node's reference leads to; InvalidSchema if it is not in the document."""
        reference = node[keyword]
        if not isinstance(reference, str):
            raise InvalidSchema(f"{keyword} is {reference!r}, not a text")
        if keyword == "$dynamicRef" and self._dynamic.get(urldefrag(reference)[1], 0) > 1:
            raise InvalidSchema(f"$dynamicRef {reference!r} has several targets")
        target = self._target(self._base_of.get(id(node), ""), reference)
        if target is None:
            raise InvalidSchema(f"{keyword} {reference!r} is not in the document")
        if not isinstance(target, dict | bool):
            raise InvalidSchema(f"{keyword} {reference!r} leads to no schema")
        if id(node) in self._old_base_of:
            old = self._target(self._old_base_of[id(node)], reference)
            if old is not None and old is not target:
                raise InvalidSchema(
                    "$id beside $ref has no certain meaning without $schema, which names a draft"
                )
        self._modernise(target, reference)
        return target

    def _target(self, base: str, reference: str) -> Any:
        """The target of a reference; None if it is not in the document."""
        # urljoin does not know that a URN may be a base.
        uri = base + reference if reference.startswith("#") else urljoin(base, reference)
        base, fragment = urldefrag(uri)
        if uri in self._by_uri:
            return self._by_uri[uri]
        target = self._by_uri.get(base)
        if target is None and base == "":
            target = self.root
        if target is None or (fragment and not fragment.startswith("/")):
            return None
        for part in unquote(fragment).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key == "items" and "prefixItems" in target:
                key = "prefixItems"
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                return None
        return target

    def is_recursive(self, target: Any) -> bool:
        """Whether references of a schema lead to the schema itself."""
        if not isinstance(target, dict):
            return False
        if id(target) not in self._recursive:
            self._find_cycles(target)
        return self._recursive[id(target)]

    def _find_cycles(self, start: dict[str, Any]) -> None:
        """Tarjan's strongly connected components of the schemas that are reached, without recursion."""
        order: dict[int, int] = {}
        lowest: dict[int, int] = {}
        open_ids: list[int] = []
        is_open: set[int] = set()
        path: list[tuple[dict[str, Any], Iterator[dict[str, Any]]]] = []

        def enter(node: dict[str, Any]) -> None:
            order[id(node)] = lowest[id(node)] = len(order)
            open_ids.append(id(node))
            is_open.add(id(node))
            self._recursive[id(node)] = False
            path.append((node, iter(self._referenced(node))))

        enter(start)
        while path:
            node, edges = path[-1]
            for target in edges:
                if target is node:
                    self._recursive[id(node)] = True
                if id(target) not in self._recursive:
                    enter(target)
                    break
                if id(target) in is_open:
                    lowest[id(node)] = min(lowest[id(node)], order[id(target)])
            else:
                path.pop()
                if path:
                    parent = id(path[-1][0])
                    lowest[parent] = min(lowest[parent], lowest[id(node)])
                if lowest[id(node)] == order[id(node)]:
                    component: list[int] = []
                    while not component or component[-1] != id(node):
                        component.append(open_ids.pop())
                    is_open.difference_update(component)
                    for member in component if len(component) > 1 else ():
                        self._recursive[member] = True

    def _referenced(self, node: dict[str, Any]) -> list[dict[str, Any]]:
        """Targets of the references in a schema, not of those in the targets."""
        targets: list[dict[str, Any]] = []
        open_values: list[Any] = [node]
        while open_values:
            value = open_values.pop()
            if isinstance(value, list):
                open_values.extend(value)
            if not isinstance(value, dict):
                continue
            for name in ("$ref", "$dynamicRef"):
                if isinstance(value.get(name), str):
                    target = self.resolve(value, name)
                    if isinstance(target, dict):
                        targets.append(target)
            used = {name: entry for name, entry in value.items() if name not in ("$defs", "definitions")}
            open_values.extend(subschemas(used))
        return targets

    def copied(self, copy: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
        """The copy of a schema or of a part of it; its references lead where those of the schema lead."""
        self._base_of[id(copy)] = self._base_of.get(id(node), "")
        if id(node) in self._old_base_of:
            self._old_base_of[id(copy)] = self._old_base_of[id(node)]
        self._copies.append(copy)
        return copy

    def _modernise(self, node: Any, place: str) -> None:
        """Spell as draft 2020-12 does what earlier drafts spelled differently.

        place: the pointer to the node, for errors.
        """
        if not isinstance(node, dict) or id(node) in self._modern:
            return
        self._modern.add(id(node))
        if isinstance(node.get("items"), list):
            node["prefixItems"] = node.pop("items")
            if "additionalItems" in node:
                node["items"] = node.pop("additionalItems")
        elif "items" in node or "prefixItems" not in node:
            node.pop("additionalItems", None)  # means nothing beside a schema or nothing
        for exclusive, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and limit in node:
                node[exclusive] = node.pop(limit)
        if not self._is_open and "properties" in node and "unevaluatedProperties" not in node:
            node.setdefault("additionalProperties", False)
        dependencies = node.pop("dependencies", None)
        if isinstance(dependencies, dict):
            _check_shape(node, place)  # of what they are added to
            for name, value in dependencies.items():
                keyword = "dependentRequired" if isinstance(value, list) else "dependentSchemas"
                node.setdefault(keyword, {})[name] = value
        if node.get("$recursiveRef") == "#":
            node["$dynamicRef"] = node.pop("$recursiveRef")
        _check_shape(node, place)
        for name, value in node.items():
            if name in SCHEMA_MAPS and isinstance(value, dict):
                for key, entry in value.items():
                    self._modernise(entry, pointer(place, name, key))
            elif name in SCHEMA_LISTS and isinstance(value, list):
                for index, entry in enumerate(value):
                    self._modernise(entry, pointer(place, name, index))
            elif name in SCHEMAS:
                self._modernise(value, pointer(place, name))

    def _index(self, node: Any, base: str) -> None:
        if isinstance(node, list):
            for entry in node:
                self._index(entry, base)
        if not isinstance(node, dict):
            return
        own = node.get("$id", node.get("id") if self._has_id else None)
        if isinstance(own, str) and not ("$ref" in node and self._is_old):
            if own.startswith("#"):
                self._by_uri.setdefault(base + own, node)
            else:
                if "$ref" in node and not self._has_dialect:
                    self._old_base_of[id(node)] = base
                base = urldefrag(urljoin(base, own))[0]
                self._by_uri.setdefault(base, node)
        for keyword in ("$anchor", "$dynamicAnchor"):
            anchor = node.get(keyword)
            if isinstance(anchor, str):
                self._by_uri.setdefault(f"{base}#{anchor}", node)
                if keyword == "$dynamicAnchor":
                    self._dynamic[anchor] = self._dynamic.get(anchor, 0) + 1
        if node.get("$recursiveAnchor") is True:  # what $recursiveRef became refers to the empty anchor
            self._dynamic[""] = self._dynamic.get("", 0) + 1
        self._base_of[id(node)] = base
        for value in subschemas(node):
            self._index(value, base)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _is_types(value: Any) -> bool:
    return TYPES.issuperset(value) if _is_texts(value) else isinstance(value, str) and value in TYPES


# The shape of a keyword's value in words, and a test for it.
_SHAPES: dict[str, tuple[str, Callable[[Any], bool]]] = (
    dict.fromkeys(SCHEMA_MAPS, ("an object of schemas", lambda value: _is_map(value, _is_schema)))
    | dict.fromkeys(
        SCHEMA_LISTS,
        ("a list of schemas", lambda value: isinstance(value, list) and all(map(_is_schema, value))),
    )
    | dict.fromkeys(SCHEMAS, ("a schema", _is_schema))
    | dict.fromkeys(COUNTS, ("a whole number from 0", lambda value: type(value) is int and value >= 0))
    | dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), ("a number", is_number))
    | dict.fromkeys(
        ("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor", "$id"),
        ("a text", lambda value: isinstance(value, str)),
    )
    | {
        "multipleOf": ("a number above 0", lambda value: is_number(value) and value > 0),
        "required": ("a list of texts", _is_texts),
        "dependentRequired": ("an object of lists of texts", lambda value: _is_map(value, _is_texts)),
        "enum": ("a list with values", lambda value: isinstance(value, list) and bool(value)),
        "uniqueItems": ("a bool", lambda value: isinstance(value, bool)),
        "type": (f"one of {', '.join(sorted(TYPES))} or a list of them", _is_types),
    }
)


def _is_map(value: Any, is_entry: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_entry, value.values()))


def _check_shape(node: dict[str, Any], place: str) -> None:
    for name in node.keys() & _SHAPES.keys():
        shape, has_shape = _SHAPES[name]
        if not has_shape(node[name]):
            text = dumps(node[name])
            shown = text if len(text) <= 60 else text[:60] + " ..."
            raise InvalidSchema(f"{name} is {shown}, not {shape}, at {place}")


def pointer(parent: str, *keys: str | int) -> str:
    return parent + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def _check_size(root: Any) -> None:
    count, level, depth = 0, [root], 0
    while level:
        count += len(level)
        if count > MAX_VALUES:
            raise SchemaTooLarge(f"json_schema has more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise SchemaTooLarge(f"json_schema is nested deeper than {MAX_DEPTH} levels")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
        level, depth = below, depth + 1


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
