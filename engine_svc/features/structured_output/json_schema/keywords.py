"""The keywords that each grammar backend enforces, and the choice of a backend for a schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine_svc.features.structured_output.json_schema.document import pointer
from engine_svc.features.structured_output.json_schema.lark_rules import (
    SchemaRules,
    is_within,
    needs_rules,
)
from engine_svc.features.structured_output.json_schema.logic import NUMBER_KEYWORDS
from engine_svc.features.structured_output.json_schema.rewrite import Unenforced, rewrite
from engine_svc.features.structured_output.json_schema.shapes import UnsupportedShape
from engine_svc.features.structured_output.limits import SCHEMA_MAPS
from triptych_kit.exact_json import dumps

BACKENDS = ("llguidance", "xgrammar")  # the order in which `auto` tries them
# Assertions and applicators that are enforced wherever they stand. Others are enforced where an equal schema
# without them is found, and refused by name elsewhere.
ENFORCED_KEYWORDS = (
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern", "format", "properties", "required", "additionalProperties",
    "dependentRequired", "dependentSchemas", "items", "prefixItems", "minItems", "maxItems", "contains",
    "allOf", "anyOf", "$ref", "$anchor", "$defs",
)  # fmt: skip

# Keywords that xgrammar was seen to enforce alone in a schema. Beside each other many of them are ignored. A
# text with a limit on its length may have control characters as they are, and no escapes.
_XGRAMMAR_TYPES = {
    "string": set(),
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


@dataclass(frozen=True, slots=True)
class ServedSchema:
    """A schema as it is sent to a backend, and its keywords that this backend does not enforce."""

    backend: str
    text: str
    unenforced: tuple[Unenforced, ...]


class UnenforcedKeywords(ValueError):
    """No allowed backend enforces the whole schema; the message names keyword and place."""

    def __init__(self, unenforced: Sequence[Unenforced]) -> None:
        self.unenforced = tuple(unenforced)
        rest = f" (and {len(unenforced) - 1} more)" if len(unenforced) > 1 else ""
        super().__init__(f"{unenforced[0]}{rest}")


def serve(
    text: str,
    backends: Sequence[str] = BACKENDS,
    *,
    is_lenient: bool = False,
    has_additional_properties: bool = True,
) -> ServedSchema:
    """The schema for the first backend that enforces all of it.

    The backend is given the text as it is, with additional properties: rewriting has dealt with them.
    With is_lenient, for the first backend, without the keywords that it cannot enforce. Raises
    UnenforcedKeywords, InvalidSchema, SchemaTooLarge.
    """
    rewritten = rewrite(text, has_additional_properties=has_additional_properties)
    first: ServedSchema | None = None
    for backend in backends:
        unenforced, schema = rewritten.unenforced, rewritten.schema
        if backend == "xgrammar":
            unenforced += tuple(_beyond_xgrammar(schema, ""))
        elif (unwritten := _without_rules(schema)) is not None:
            unenforced, schema = (*unenforced, unwritten), _plain(schema)
        served = ServedSchema(backend, dumps(schema), unenforced)
        if not unenforced:
            return served
        first = first or served
    if first is None:
        raise ValueError("no backend is allowed")
    if is_lenient:
        return first
    raise UnenforcedKeywords(first.unenforced)


def _without_rules(schema: dict[str, Any]) -> Unenforced | None:
    """A keyword that keeps a rewritten schema from being written as rules for llguidance."""
    if needs_rules(schema) and not is_within(schema):
        try:
            SchemaRules(schema, {})
        except UnsupportedShape as error:
            return Unenforced(error.keyword, error.place, error.reason)
    return None


def _plain(schema: Any) -> Any:
    """The schema without keywords that llguidance ignores or reads as others."""
    if isinstance(schema, list):
        return [_plain(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: value for name, value in schema.items() if name not in NUMBER_KEYWORDS | {"contains"}}
    for name, value in plain.items():
        if name in SCHEMA_MAPS:
            plain[name] = {key: _plain(entry) for key, entry in value.items()}
        elif name not in ("const", "enum"):
            plain[name] = _plain(value)
    return plain


def _beyond_xgrammar(schema: Any, place: str) -> Iterator[Unenforced]:
    """Keywords of a rewritten schema that xgrammar ignores or reads differently."""
    if isinstance(schema, bool):
        if not schema:
            yield Unenforced("false", place, "xgrammar does not enforce it here")
        return
    for name, entry in schema.get("$defs", {}).items():
        yield from _beyond_xgrammar(entry, pointer(place, "$defs", name))
    own = {name: value for name, value in schema.items() if name in NUMBER_KEYWORDS | {"const", "enum"}}
    if needs_rules(own):
        yield Unenforced(next(iter(own)), place, "xgrammar reads numbers as doubles")
    words = set(schema) - {"$defs"}
    if not words or words in ({"$ref"}, {"const"}, {"enum"}):
        return
    if words == {"anyOf"}:
        for index, entry in enumerate(schema["anyOf"]):
            yield from _beyond_xgrammar(entry, pointer(place, "anyOf", index))
        return
    kind = schema.get("type")
    known = _XGRAMMAR_TYPES.get(kind, set()) if isinstance(kind, str) else set()
    for word in sorted(words - known - ({"type"} if isinstance(kind, str) else set())):
        yield Unenforced(word, place, "xgrammar does not enforce it here")
    named = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in named:
            yield Unenforced("required", place, f"xgrammar needs {name!r} among properties")
    for name, entry in named.items():
        yield from _beyond_xgrammar(entry, pointer(place, "properties", name))
    extra = schema.get("additionalProperties")
    # A key that is named may come again as an additional one, under the other schema.
    if kind == "object" and named and extra is not False:
        yield Unenforced("properties", place, "xgrammar allows them again as additional ones")
    if extra not in (None, False):
        yield from _beyond_xgrammar(extra, pointer(place, "additionalProperties"))
    for index, entry in enumerate(schema.get("prefixItems", ())):
        yield from _beyond_xgrammar(entry, pointer(place, "prefixItems", index))
    if schema.get("items") not in (None, False):
        yield from _beyond_xgrammar(schema["items"], pointer(place, "items"))
