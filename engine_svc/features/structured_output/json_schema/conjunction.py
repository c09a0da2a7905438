"""The intermediate form of a rewriting: a schema as the conjunction of parts that are written one by one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import and_
from typing import Any, Protocol

from engine_svc.features.structured_output.json_schema.document import SchemaDocument, pointer
from engine_svc.features.structured_output.json_schema.languages import (
    STEPS,
    Texts,
    has_lookahead,
    rust_pattern,
)
from engine_svc.features.structured_output.json_schema.logic import Prover, kinds_of_type
from engine_svc.features.structured_output.json_schema.patterns import (
    UnsupportedPattern,
    ecma_pattern,
    translated,
)

MAX_PATTERNS = 2  # that stand beside each other as they are


@dataclass(frozen=True, slots=True)
class Subschema:
    """A schema that is still to be rewritten.

    beside: a schema that its values satisfy, too; the rewritten one may say nothing of other values.
    """

    schema: Any
    place: str  # pointer for reports
    beside: Any = True


@dataclass(slots=True)
class Conjunction:
    """The parts of a schema, in the order in which they are written. A value satisfies all of them.

    Parts of type Any are in supported keywords already.
    """

    keywords: dict[str, Any]  # supported ones that stand beside each other
    references: list[Any] = field(default_factory=list)  # `$ref`, and a second `pattern`
    joined: list[Subschema] = field(default_factory=list)  # targets of references in place, and `allOf`
    equivalents: list[Subschema] = field(default_factory=list)  # of keywords that no backend enforces
    closures: list[Any] = field(default_factory=list)  # limits on the names of properties
    alternatives: list[Subschema] | None = None  # `anyOf`


class Rewriter(Protocol):
    """The parts of a rewriting that rules of keywords use."""

    document: SchemaDocument
    prover: Prover

    def rewrite(self, subschema: Subschema, *, is_inlined: bool = False) -> Any: ...
    def reference(self, target: dict[str, Any]) -> dict[str, Any]: ...
    def report(self, keyword: str, place: str, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Node:
    """A schema on its way into a conjunction: the input of rules, and the ways in which they add parts."""

    rewriter: Rewriter
    keywords: dict[str, Any]  # without annotations, and those that all values of its types satisfy
    place: str
    is_inlined: bool  # without references to schemas that contain themselves
    beside: Any  # as of a Subschema
    parts: Conjunction

    @property
    def prover(self) -> Prover:
        return self.rewriter.prover

    def subschema(self, schema: Any, *path: str | int) -> Any:
        """The rewritten schema of a part of the value: a property, an item."""
        return self.rewriter.rewrite(Subschema(schema, pointer(self.place, *path)))

    def require(self, schema: Any, *path: str | int) -> None:
        """Add the equivalent of a keyword: a schema in any keywords, which is rewritten in turn."""
        self.parts.equivalents.append(Subschema(schema, pointer(self.place, *path)))

    def report(self, keyword: str, reason: str) -> None:
        """List the keyword as one that is not enforced here."""
        self.rewriter.report(keyword, self.place, reason)

    def pattern(self, pattern: str, keyword: str) -> str | None:
        """The translated pattern; None, and a report of the keyword, if it has no translation."""
        if has_lookahead(pattern):
            self.prover.spend(STEPS)
        try:
            return rust_pattern(pattern)
        except UnsupportedPattern as error:
            self.report(keyword, f"{error} is not supported")
            return None

    def without(self, *names: str) -> dict[str, Any]:
        """The schema without some keywords."""
        rest = {name: value for name, value in self.keywords.items() if name not in names}
        return self.rewriter.document.copied(rest, self.keywords)

    def context(self, *names: str) -> dict[str, Any]:
        """A schema of the knowledge about values beside some keywords."""
        return {"allOf": [self.without(*names), self.beside]}

    def with_keywords(self, keywords: dict[str, Any]) -> Node:
        return replace(self, keywords=self.rewriter.document.copied(keywords, self.keywords))

    def write(self, names: list[str]) -> Any:
        """The conjunction as one schema; False if a part is.

        names: the keywords of the original, in the order of its text.
        """
        parts = self.parts
        rewrite = partial(self.rewriter.rewrite, is_inlined=self.is_inlined)
        before = [*parts.references, *map(rewrite, parts.joined)]
        behind = [*map(rewrite, parts.equivalents), *parts.closures]
        if parts.alternatives is not None:
            behind.append(_any_of([*map(rewrite, parts.alternatives)]))
        if False in before or False in behind:
            return False
        before, behind = ([entry for entry in side if entry not in (True, {})] for side in (before, behind))
        keywords = parts.keywords
        if set(keywords) == {"type"} and (before or behind) and self._is_type_implied(keywords["type"]):
            keywords = {}  # would keep a reference from standing alone
        if keywords and _joins_first(names):
            before, keywords = [*before, keywords], {}
        entries = self._with_joined_patterns([*before, *behind])
        if False in entries:
            return False
        if not entries:
            return keywords
        if len(entries) == 1 and (not keywords or set(entries[0]) == {"anyOf"}):
            return keywords | entries[0]
        return keywords | {"allOf": entries}

    def _with_joined_patterns(self, entries: list[Any]) -> list[Any]:
        """The entries, many that are patterns of texts as one; False if no text has them all.

        The work of a backend for each token is exponential in the number of patterns.
        """
        is_text = any("type" in entry and kinds_of_type(entry["type"]) == {"string"} for entry in entries)
        patterns = [entry["pattern"] for entry in entries if _is_pattern(entry)]
        if not is_text or len(patterns) <= MAX_PATTERNS:
            return entries
        try:
            joined = self.prover.pattern_of(reduce(and_, (Texts.of(ecma_pattern(one)) for one in patterns)))
        except UnsupportedPattern:
            return entries
        text = joined is not None and {"type": "string", "pattern": translated(joined)}
        return [text, *(entry for entry in entries if not _is_pattern(entry))]

    def _is_type_implied(self, type_: Any) -> bool:
        return self.prover.kinds(self.without("type")) <= kinds_of_type(type_)


def _is_pattern(entry: Any) -> bool:
    return "pattern" in entry and entry.keys() <= {"type", "pattern"}


def _any_of(branches: list[Any]) -> Any:
    branches = [entry for entry in branches if entry is not False]
    if not branches:
        return False
    if any(entry is True or entry == {} for entry in branches):
        return True
    return {"anyOf": branches} if len(branches) > 1 else branches[0]


def _joins_first(names: list[str]) -> bool:
    """Whether joined schemas stand before `properties`. Backends allow keys in the order of the schema."""
    joins = [names.index(name) for name in ("$ref", "$dynamicRef", "allOf") if name in names]
    return bool(joins) and "properties" in names and min(joins) < names.index("properties")
