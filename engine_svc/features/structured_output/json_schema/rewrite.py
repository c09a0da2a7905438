"""Schemas in the keywords that a grammar backend enforces, and the keywords without such a form.

The result has the same instances, apart from the order of keys that every backend fixes. Keywords that are
not enforced are listed with their place; the result is then the schema without them.

The rules of its keywords read a schema into a Conjunction, which is then written as a schema. Rules rewrite
the schemas of parts of the value; those of the value itself are rewritten when the conjunction is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine_svc.features.structured_output.json_schema.conjunction import Conjunction, Node, Subschema
from engine_svc.features.structured_output.json_schema.document import (
    InvalidSchema,
    SchemaDocument,
    SchemaTooLarge,
)
from engine_svc.features.structured_output.json_schema.instances import values_left
from engine_svc.features.structured_output.json_schema.logic import (
    ANNOTATIONS,
    KINDS,
    OBJECT_KEYWORDS,
    Prover,
    is_trivial,
    kind_of,
    kinds_of_type,
)  # fmt: skip
from engine_svc.features.structured_output.json_schema.productivity import without_endless
from engine_svc.features.structured_output.json_schema.rules import (
    IN_PLACE,
    PLAIN_KEYWORDS,
    RULES,
    with_named_patterns,
)

MAX_NODES = 20_000  # of the result
MAX_DEPTH = 150  # of the result; a rewritten keyword adds up to two levels
MAX_JOINS = 16  # nested joins in which a recursive reference is searched


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A keyword that no rewriting makes enforceable."""

    keyword: str
    pointer: str  # of the schema that has it
    reason: str

    def __str__(self) -> str:
        place = f"#{self.pointer}" if self.pointer else "#"
        return f"{self.keyword} at {place}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Rewritten:
    schema: dict[str, Any]
    unenforced: tuple[Unenforced, ...]


def rewrite(text: str, *, has_additional_properties: bool = True) -> Rewritten:
    """Raises InvalidSchema or SchemaTooLarge.

    Without has_additional_properties each schema with `properties` allows no others, unless it says so.
    """
    try:
        document = SchemaDocument(text, has_additional_properties=has_additional_properties)
        return _Rewriting(document).run()
    except RecursionError:
        raise SchemaTooLarge("json_schema becomes too deep") from None


class _Rewriting:
    """One document's rewriting. It holds the definitions of the result, and its limits."""

    def __init__(self, document: SchemaDocument) -> None:
        self.document = document
        self.prover = Prover(document)
        self._unenforced: dict[tuple[str, str], Unenforced] = {}
        self._names: dict[int, str] = {}  # of targets of references, by identity
        self._targets: list[tuple[Any, str]] = []
        self._joins: dict[int, bool] = {}
        self._inlining: set[int] = set()  # schemas that are being written in the place of a reference
        self._kept: list[Any] = []  # schemas known by identity
        self._num_nodes = 0
        self._depth = 0

    def run(self) -> Rewritten:
        root = self.rewrite(Subschema(self.document.root, ""))
        definitions = self._definitions()
        if root is False:
            raise InvalidSchema("json_schema is false, which no output satisfies")
        schema = {} if root is True else dict(root)
        _check_cycles(schema, definitions)
        schema, definitions = without_endless(schema, definitions)
        if schema is False:
            raise InvalidSchema("json_schema is satisfied by no finite value")
        if definitions:
            schema["$defs"] = definitions
        return Rewritten(schema, tuple(self._unenforced.values()))

    def _definitions(self) -> dict[str, Any]:
        """The rewritten targets of references, which may have references to more of them."""
        definitions: dict[str, Any] = {}
        for target, name in self._targets:  # grows
            place = "" if target is self.document.root else f"/$defs/{name}"
            is_inlined = self._joins_recursive(target)
            definitions[name] = self.rewrite(Subschema(target, place), is_inlined=is_inlined)
        return definitions

    def rewrite(self, subschema: Subschema, *, is_inlined: bool = False) -> Any:
        """The schema in supported keywords.

        is_inlined: without references to schemas that contain themselves.
        """
        schema = subschema.schema
        if isinstance(schema, bool):
            return schema
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise SchemaTooLarge(f"json_schema becomes larger than {MAX_NODES} schemas")
        if not is_inlined and self._joins_recursive(schema):
            return self.reference(schema)
        if self._depth >= MAX_DEPTH:
            raise SchemaTooLarge(f"json_schema becomes deeper than {MAX_DEPTH} levels")
        if is_inlined and id(schema) in self._inlining:
            raise InvalidSchema("$ref leads to itself")
        self._depth += 1
        if is_inlined:
            self._inlining.add(id(schema))
        try:
            values = values_left(self.prover, schema)
            if values == []:
                return False
            if values:
                schema = self.document.copied({"enum": values}, schema)
                subschema = replace(subschema, schema=schema)
            node = self._node(subschema, is_inlined)
            named = with_named_patterns(node)
            for keyword, rule in RULES:
                view = named if keyword in OBJECT_KEYWORDS else node
                if keyword in view.keywords:
                    rule(view, keyword)
            return node.write(list(schema))
        finally:
            self._depth -= 1
            if is_inlined:
                self._inlining.discard(id(schema))

    def _node(self, subschema: Subschema, is_inlined: bool) -> Node:
        schema = subschema.schema
        kinds = kinds_of_type(schema["type"]) if "type" in schema else KINDS
        if "enum" in schema or "const" in schema:
            kinds &= {kind_of(value) for value in schema.get("enum", [schema.get("const")])}
        keywords = {
            name: value
            for name, value in schema.items()
            if name not in ANNOTATIONS and not is_trivial(name, kinds)
        }
        plain = {name: keywords[name] for name in PLAIN_KEYWORDS if name in keywords}
        return Node(
            self,
            self.document.copied(keywords, schema),
            subschema.place,
            is_inlined,
            subschema.beside,
            Conjunction(plain),
        )

    def reference(self, target: dict[str, Any]) -> dict[str, Any]:
        """A reference to the target as a definition of the result."""
        if id(target) not in self._names:
            self._names[id(target)] = f"d{len(self._names)}"
            self._targets.append((target, self._names[id(target)]))
        return {"$ref": f"#/$defs/{self._names[id(target)]}"}

    def report(self, keyword: str, place: str, reason: str) -> None:
        self._unenforced.setdefault((keyword, place), Unenforced(keyword, place, reason))

    def _joins_recursive(self, schema: Any) -> bool:
        """Whether a schema that contains itself is joined with other keywords, which backends refuse."""
        words = {name for name in schema if name not in ANNOTATIONS}
        if not words & IN_PLACE or words in ({"$ref"}, {"$dynamicRef"}):
            return False
        if id(schema) not in self._joins:
            self._joins[id(schema)] = self._reaches_recursive(schema, 0)
            self._kept.append(schema)
        return self._joins[id(schema)]

    def _reaches_recursive(self, schema: Any, depth: int) -> bool:
        """Whether a reference in place, here or in joined schemas, leads to a schema that contains itself."""
        if isinstance(schema, bool) or depth > MAX_JOINS:
            return False
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema and self.document.is_recursive(self.document.resolve(schema, keyword)):
                return True
        return any(
            self._reaches_recursive(entry, depth + 1)
            for keyword in ("allOf", "anyOf", "oneOf")
            for entry in schema.get(keyword, ())
        )


def _check_cycles(root: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Refuse references that lead to themselves without a step into the value: they never end."""
    is_done: dict[str, bool] = {}  # by name of a definition

    def visit(schema: Any) -> None:
        if isinstance(schema, bool):
            return
        name = schema.get("$ref", "").removeprefix("#/$defs/")
        if is_done.get(name) is False:
            raise InvalidSchema("$ref leads to itself")
        if name and name not in is_done:
            is_done[name] = False
            visit(definitions[name])
            is_done[name] = True
        for entry in (*schema.get("allOf", ()), *schema.get("anyOf", ())):
            visit(entry)

    for schema in (root, *definitions.values()):
        visit(schema)
