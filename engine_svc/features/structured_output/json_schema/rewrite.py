"""Schemas in the keywords that a grammar backend enforces, and which of their keywords have no such form.

The result has the same instances, apart from the order of keys that every backend fixes. What is left over is
listed by keyword and place; the result is then the schema without these keywords.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from engine_svc.features.structured_output.json_schema.document import (
    InvalidSchema,
    SchemaDocument,
    SchemaTooLarge,
    pointer,
)
from engine_svc.features.structured_output.json_schema.logic import (
    ANNOTATIONS,
    KINDS,
    UNITS,
    CannotNegate,
    Prover,
    is_trivial,
    json_key,
    kind_of,
    kinds_of_type,
    type_of_kinds,
)  # fmt: skip
from engine_svc.features.structured_output.json_schema.patterns import (
    UnsupportedPattern,
    literal,
    rust_pattern,
    texts_of,
)

MAX_NODES = 20_000  # of the result
MAX_DEPTH = 150  # of the result; a rewritten keyword adds up to two levels
MAX_BRANCHES = 64  # that one keyword may become
MAX_NAMED = 16  # names of a pattern that are written as properties
MAX_DISJOINT = 64  # branches of a oneOf: all pairs are compared
FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # that the backend enforces
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_D = "[0-9]"
# With leap years, which the backend's own format does not know.
_DATE = (
    f"(?:(?:{_D}{_D}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29|{_D}{{4}}-(?:"
    f"(?:0[13578]|1[02])-(?:0[1-9]|[12]{_D}|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]{_D}|30)|02-(?:0[1-9]|1{_D}|2[0-8])))"
)
# With leap seconds only where UTC has them, which the backend's own format takes in any minute.
_TIME = f"(?:{_D}{_D}:{_D}{_D}:[0-5]{_D}|23:59:60(?:[.]{_D}+)?[Zz])"
_VARIABLE = (
    rf"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{{2}})(?:\.?(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{{2}}))*(?::[1-9]{_D}{{0,3}}|\*)?"
)
_FORMAT_PATTERNS = {
    "uri-template": (
        r"^(?:[^\x00-\x20\x7f\"'%<>\\^`{|}]|%[0-9A-Fa-f]{2}|"
        rf"\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$"
    ),
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}",
    "time": f"^{_TIME}",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
# Formats of the standard that are annotations here, as all unknown ones: by the standard every format may be.
ANNOTATED_FORMATS = frozenset({"idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "regex"})
_PLAIN = (
    "type", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "required", "minItems", "maxItems",
)  # fmt: skip
_IN_PLACE = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf"})
_CONTROLS = frozenset(map(chr, range(32))) - set("\b\f\n\r\t") | {"\x7f"}


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
    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._prover = Prover(document)
        self._unenforced: dict[tuple[str, str], Unenforced] = {}
        self._names: dict[int, str] = {}  # of targets of references, by identity
        self._targets: list[tuple[Any, str]] = []
        self._joins: dict[int, bool] = {}
        self._inlining: set[int] = set()  # schemas that are being written in the place of a reference
        self._kept: list[Any] = []  # schemas known by identity
        self._num_nodes = 0
        self._depth = 0

    def run(self) -> Rewritten:
        root = self._node(self._document.root, "")
        definitions: dict[str, Any] = {}
        done = 0
        while done < len(self._targets):
            target, name = self._targets[done]
            place = "" if target is self._document.root else f"/$defs/{name}"
            definitions[name] = self._node(target, place, is_inlined=self._joins_recursive(target))
            done += 1
        schema = {} if isinstance(root, bool) else dict(root)
        if root is False:
            raise InvalidSchema("json_schema is false, which no output satisfies")
        self._check_cycles(schema, definitions)
        if definitions:
            schema["$defs"] = definitions
        return Rewritten(schema, tuple(self._unenforced.values()))

    @staticmethod
    def _check_cycles(root: dict[str, Any], definitions: dict[str, Any]) -> None:
        """A reference that leads to itself without a step into the value says nothing, and never ends."""
        state: dict[str, int] = {}

        def visit(schema: Any) -> None:
            if not isinstance(schema, dict):
                return
            name = schema.get("$ref", "").removeprefix("#/$defs/")
            if name and state.get(name) == 1:
                raise InvalidSchema("$ref leads to itself")
            if name and name not in state:
                state[name] = 1
                visit(definitions[name])
                state[name] = 2
            for entry in (*schema.get("allOf", ()), *schema.get("anyOf", ())):
                visit(entry)

        for schema in (root, *definitions.values()):
            visit(schema)

    def _node(self, schema: Any, place: str, *, is_inlined: bool = False, beside: Any = True) -> Any:
        """The schema in supported keywords. is_inlined: without references to what contains itself.

        beside: a schema that values satisfy, too; the result may say nothing of other values.
        """
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InvalidSchema(f"#{place} is neither an object nor a bool")
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise SchemaTooLarge(f"json_schema becomes larger than {MAX_NODES} schemas")
        if not is_inlined and self._joins_recursive(schema):
            return self._reference(schema)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise SchemaTooLarge(f"json_schema becomes deeper than {MAX_DEPTH} levels")
        if is_inlined and id(schema) in self._inlining:
            raise InvalidSchema("$ref leads to itself")
        if is_inlined:
            self._inlining.add(id(schema))
        try:
            return self._rewritten(schema, place, is_inlined, beside)
        finally:
            self._depth -= 1
            if is_inlined:
                self._inlining.discard(id(schema))

    def _rewritten(self, schema: dict[str, Any], place: str, is_inlined: bool, beside: Any) -> Any:
        kinds = kinds_of_type(schema["type"]) if "type" in schema else KINDS
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
            kinds &= {kind_of(value) for value in values}
        rest = self._document.copied(
            {
                name: value
                for name, value in schema.items()
                if name not in ANNOTATIONS and not is_trivial(name, kinds)
            },
            schema,
        )
        out: dict[str, Any] = {name: rest[name] for name in _PLAIN if name in rest}
        more: list[tuple[Any, str]] = []  # schemas that must hold, too, not yet rewritten
        done: list[Any] = []  # those in supported keywords
        for keyword in ("const", "enum"):
            if keyword in rest:
                self._values(keyword, rest[keyword], place, out)
        self._string(rest, place, out, done)
        self._array(rest, place, out, more)
        closed: list[Any] = []  # the same of properties that are not evaluated, and of sizes
        self._object(rest, place, out, more, closed)
        joined: list[tuple[Any, str]] = []  # what this schema joins, in the order of its text
        self._references(rest, joined, done, place, is_inlined)
        self._applicators(rest, place, kinds, more, beside)
        first = [*done, *(self._node(entry, where, is_inlined=is_inlined) for entry, where in joined)]
        first += self._all_of(rest, place, is_inlined)
        done = [self._node(entry, where, is_inlined=is_inlined) for entry, where in more] + closed
        if "anyOf" in rest:
            done.append(self._any_of(rest, place, is_inlined))
        return self._conjunction(schema, out, first, done)

    def _all_of(self, rest: dict[str, Any], place: str, is_inlined: bool) -> list[Any]:
        """Each is rewritten for values that satisfy the others, so that fewer branches overlap."""
        entries = self._entries(rest.get("allOf", []), "allOf", place)
        own = self._without(rest, "allOf")
        return [
            self._node(
                entry,
                pointer(place, "allOf", index),
                is_inlined=is_inlined,
                beside={"allOf": [own, *entries[:index], *entries[index + 1 :]]},
            )
            for index, entry in enumerate(entries)
        ]

    def _any_of(self, rest: dict[str, Any], place: str, is_inlined: bool) -> Any:
        branches = self._entries(rest["anyOf"], "anyOf", place)
        found = [
            self._node(entry, pointer(place, "anyOf", index), is_inlined=is_inlined)
            for index, entry in enumerate(branches)
        ]
        found = [entry for entry in found if entry is not False]
        if not found:
            return False
        if any(entry is True or entry == {} for entry in found):
            return True
        return {"anyOf": found} if len(found) > 1 else found[0]

    def _conjunction(
        self, schema: dict[str, Any], out: dict[str, Any], first: list[Any], then: list[Any]
    ) -> Any:
        """All of them. Backends allow keys in the order in which they read them, here that of the text."""
        if False in first or False in then:
            return False
        first, then = ([entry for entry in part if entry not in (True, {})] for part in (first, then))
        names = list(schema)
        joins = [names.index(name) for name in ("$ref", "$dynamicRef", "allOf") if name in names]
        is_behind = bool(joins) and "properties" in names and min(joins) < names.index("properties")
        if set(out) == {"type"}:
            kinds = kinds_of_type(out["type"])
            parts = self._without(schema, "type")
            if (first or then) and self._prover.kinds(parts) <= kinds:
                out = {}  # says nothing new, but would keep a reference from standing alone
        if is_behind and out:
            first, out = [*first, out], {}
        entries = [*first, *then]
        if not entries:
            return out
        if not out and len(entries) == 1:
            return entries[0]
        if len(entries) == 1 and set(entries[0]) == {"anyOf"}:
            return out | entries[0]
        return out | {"allOf": entries}

    # References and applicators in place

    def _references(
        self,
        rest: dict[str, Any],
        joined: list[tuple[Any, str]],
        done: list[Any],
        place: str,
        is_inlined: bool,
    ) -> None:
        for keyword in ("$ref", "$dynamicRef"):
            if keyword not in rest:
                continue
            target = self._document.resolve(rest, keyword)
            if isinstance(target, bool) or (is_inlined and self._document.is_recursive(target)):
                joined.append((target, place))
            else:
                done.append(self._reference(target))
        if "$recursiveRef" in rest:
            self._report("$recursiveRef", place, "it is not supported")

    def _reference(self, target: dict[str, Any]) -> dict[str, Any]:
        if id(target) not in self._names:
            self._names[id(target)] = f"d{len(self._names)}"
            self._targets.append((target, self._names[id(target)]))
        return {"$ref": f"#/$defs/{self._names[id(target)]}"}

    def _joins_recursive(self, schema: dict[str, Any]) -> bool:
        """Whether a schema that contains itself is joined with other keywords, which backends refuse."""
        words = {name for name in schema if name not in ANNOTATIONS}
        if not words & _IN_PLACE or words in ({"$ref"}, {"$dynamicRef"}):
            return False
        if id(schema) not in self._joins:
            self._joins[id(schema)] = self._reaches(schema, 0)
            self._kept.append(schema)
        return self._joins[id(schema)]

    def _reaches(self, schema: Any, depth: int) -> bool:
        if not isinstance(schema, dict) or depth > 16:
            return False
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema and self._document.is_recursive(self._document.resolve(schema, keyword)):
                return True
        return any(
            self._reaches(entry, depth + 1)
            for keyword in ("allOf", "anyOf", "oneOf")
            for entry in self._entries(schema.get(keyword, []), keyword, "")
        )

    def _applicators(
        self,
        rest: dict[str, Any],
        place: str,
        kinds: frozenset[str],
        more: list[tuple[Any, str]],
        beside: Any,
    ) -> None:
        if "oneOf" in rest:
            self._one_of(rest, place, more, beside)
        base = {"allOf": [self._without(rest, "not", "if", "then", "else"), beside]}
        if "not" in rest and not self._prover.is_unsatisfiable(base, rest["not"]):
            known = self._prover.known(base)
            self._try("not", place, more, lambda: self._prover.negation(rest["not"], known))
        if "if" in rest and ("then" in rest or "else" in rest):
            self._if(rest, base, place, more)

    def _one_of(self, rest: dict[str, Any], place: str, more: list[tuple[Any, str]], beside: Any) -> None:
        branches = self._entries(rest["oneOf"], "oneOf", place)
        where = pointer(place, "oneOf")
        base = {"allOf": [self._without(rest, "oneOf"), beside]}
        possible = [entry for entry in branches if not self._prover.is_unsatisfiable(base, entry)]
        if len(possible) > MAX_DISJOINT:
            self._report("oneOf", place, f"it has {len(possible)} branches, {MAX_DISJOINT} are compared")
            more.append(({"anyOf": possible}, where))
            return
        try:
            more.append(({"anyOf": self._exclusive(base, possible)}, where))
        except CannotNegate as error:
            reason = f"its branches may overlap: {error} cannot be negated"
            self._report("oneOf", place, reason)
            more.append(({"anyOf": possible}, where))

    def _exclusive(self, base: dict[str, Any], branches: list[Any]) -> list[Any]:
        """Each branch without what it shares with others; apart by type, as many overlap only in some."""
        choices: list[Any] = []
        within = self._prover.kinds(base)
        for index, entry in enumerate(branches):
            overlaps: dict[tuple[int, ...], set[str]] = {}
            rivals = [
                number
                for number, other in enumerate(branches)
                if number != index and not self._prover.is_unsatisfiable(base, entry, other)
            ]
            for kinds in UNITS if rivals else ():
                kinds = within & kinds
                if not kinds:
                    continue
                only = {"type": type_of_kinds(kinds)}
                if self._prover.is_unsatisfiable(base, entry, only):
                    continue
                shared = tuple(
                    number
                    for number in rivals
                    if not self._prover.is_unsatisfiable(base, entry, branches[number], only)
                )
                overlaps.setdefault(shared, set()).update(kinds)
            if not rivals or set(overlaps) == {()}:
                choices.append(entry)
                continue
            for shared, found in overlaps.items():
                known = self._prover.known(base, entry, {"type": type_of_kinds(frozenset(found))})
                negated = [self._prover.negation(branches[number], known) for number in shared]
                if False not in negated and known.kinds:
                    choices.append({"allOf": [{"type": type_of_kinds(known.kinds)}, entry, *negated]})
        return choices or [False]

    def _without(self, rest: dict[str, Any], *keywords: str) -> dict[str, Any]:
        return self._document.copied(
            {name: value for name, value in rest.items() if name not in keywords}, rest
        )

    def _if(
        self, rest: dict[str, Any], base: dict[str, Any], place: str, more: list[tuple[Any, str]]
    ) -> None:
        condition, then, other = rest["if"], rest.get("then", True), rest.get("else", True)
        if then is True and other is True:
            return
        known = self._prover.known(base)

        def branches() -> Any:
            negated = self._prover.negation(condition, known)
            first = condition if then is True else {"allOf": [condition, then]}
            return {"anyOf": [first, {"allOf": [negated, other]}]}

        self._try("if", place, more, branches)

    def _try(self, keyword: str, place: str, more: list[tuple[Any, str]], made: Any) -> None:
        try:
            more.append((made(), pointer(place, keyword)))
        except CannotNegate as error:
            self._report(keyword, place, f"{error} cannot be negated")

    # Values, strings, arrays, objects

    def _values(self, keyword: str, value: Any, place: str, out: dict[str, Any]) -> None:
        if keyword == "enum" and (not isinstance(value, list) or not value):
            raise InvalidSchema(f"#{place}: enum is not a list of values")
        if _has_control(value):
            self._report(keyword, place, "it has a control character")
        else:
            out[keyword] = value

    def _string(self, rest: dict[str, Any], place: str, out: dict[str, Any], done: list[Any]) -> None:
        form = rest.get("format")
        if form in FORMATS and form != "date":
            out["format"] = form
        patterns = [(rest["pattern"], "pattern")] if "pattern" in rest else []
        if form in _FORMAT_PATTERNS:
            patterns.append((_FORMAT_PATTERNS[form], "format"))
        for pattern, keyword in patterns:
            translated = self._pattern(pattern, keyword, place)
            if translated is None:
                continue
            if "pattern" in out:
                done.append({"pattern": translated})
            else:
                out["pattern"] = translated

    def _pattern(self, pattern: Any, keyword: str, place: str) -> str | None:
        if not isinstance(pattern, str):
            raise InvalidSchema(f"#{place}: {keyword} is not a text")
        try:
            return rust_pattern(pattern)
        except UnsupportedPattern as error:
            self._report(keyword, place, f"{error} is not supported")
            return None

    def _array(
        self, rest: dict[str, Any], place: str, out: dict[str, Any], more: list[tuple[Any, str]]
    ) -> None:
        if "prefixItems" in rest:
            entries = self._entries(rest["prefixItems"], "prefixItems", place)
            out["prefixItems"] = [
                self._node(entry, pointer(place, "prefixItems", i)) for i, entry in enumerate(entries)
            ]
        if "items" in rest:
            out["items"] = self._node(rest["items"], pointer(place, "items"))
        elif rest.get("unevaluatedItems", True) is not True:
            if set(rest) & {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "not", "contains"}:
                self._report("unevaluatedItems", place, "it stands beside schemas that evaluate items")
            else:
                out["items"] = self._node(rest["unevaluatedItems"], pointer(place, "unevaluatedItems"))
        if rest.get("uniqueItems") is True and not self._is_unique(rest):
            self._report("uniqueItems", place, "it has no equal in other keywords")
        if "contains" in rest:
            self._contains(rest, place, more)

    def _is_unique(self, rest: dict[str, Any]) -> bool:
        """Whether other keywords keep items apart."""
        most = rest.get("maxItems", math.inf)
        prefix = rest.get("prefixItems", [])
        if rest.get("items") is False:
            most = min(most, len(prefix))
        if most <= 1:
            return True
        return most <= min(len(prefix), 8) and all(
            self._prover.is_unsatisfiable(first, second)
            for first, second in combinations(prefix[: int(most)], 2)
        )

    def _contains(self, rest: dict[str, Any], place: str, more: list[tuple[Any, str]]) -> None:
        wanted, least, most = rest["contains"], rest.get("minContains", 1), rest.get("maxContains")
        if most is None and least == 0:
            return
        if most is not None and most < least:
            more.append((_or_other("array"), place))
            return
        size = rest.get("maxItems", math.inf)
        items = rest.get("items", {})
        is_every = json_key(wanted) == json_key(items) or {json_key(wanted), json_key(items)} == {
            "{}",
            "true",
        }
        if "prefixItems" not in rest and is_every:
            limits = {"type": "array", "minItems": least}
            if most is not None:
                limits["maxItems"] = most
            more.append((_or_other("array", limits), place))
        elif most is None and least == 1 and size <= 16:
            at = [
                {"type": "array", "prefixItems": [*[True] * index, wanted], "minItems": index + 1}
                for index in range(int(size))
            ]
            more.append((_or_other("array", *at), pointer(place, "contains")))
        elif most == 0:
            self._try(
                "contains",
                place,
                more,
                lambda: _or_other("array", {"type": "array", "items": self._prover.negation(wanted)}),
            )
        else:
            self._report("contains", place, "it has no equal in other keywords")

    def _object(
        self,
        rest: dict[str, Any],
        place: str,
        out: dict[str, Any],
        more: list[tuple[Any, str]],
        done: list[Any],
    ) -> None:
        rest = self._with_named_patterns(rest)
        if "properties" in rest:
            out["properties"] = {}
            for name, entry in self._map(rest["properties"], "properties", place).items():
                out["properties"][name] = self._node(entry, pointer(place, "properties", name))
                if _has_control(name):
                    self._report("properties", place, "a name has a control character")
        if "patternProperties" in rest:
            out["patternProperties"] = {}
            for name, entry in self._map(rest["patternProperties"], "patternProperties", place).items():
                if entry in (True, {}) and not {"additionalProperties", "unevaluatedProperties"} & set(rest):
                    continue
                translated = self._pattern(name, "patternProperties", place)
                where = pointer(place, "patternProperties", name)
                if translated is not None and _matches_all(translated):
                    # Not beside other patterns, from which backends keep it apart.
                    named = rest.get("properties", {}).values()
                    is_implied = all(self._prover.implies(value, entry) for value in named)
                    is_alone = len(rest["patternProperties"]) == 1 and "additionalProperties" not in rest
                    if is_implied and is_alone:
                        out["additionalProperties"] = self._node(entry, where)
                    else:
                        more.append(({"additionalProperties": entry}, where))
                    if "additionalProperties" in rest or "unevaluatedProperties" in rest:
                        out["patternProperties"][translated] = True
                elif translated is not None:
                    out["patternProperties"][translated] = self._node(entry, where)
            if not out["patternProperties"]:
                del out["patternProperties"]
        if "additionalProperties" in rest:
            extra = rest["additionalProperties"]
            out["additionalProperties"] = self._node(extra, pointer(place, "additionalProperties"))
        elif rest.get("unevaluatedProperties", True) is not True:
            self._unevaluated(rest, place, done)
        for name, names in self._map(rest.get("dependentRequired", {}), "dependentRequired", place).items():
            needed = {"required": [name, *names]}
            more.append(({"anyOf": [{"properties": {name: False}}, needed]}, place))
        for name, entry in self._map(rest.get("dependentSchemas", {}), "dependentSchemas", place).items():
            where = pointer(place, "dependentSchemas", name)
            more.append(
                ({"anyOf": [{"properties": {name: False}}, {"required": [name], "allOf": [entry]}]}, where)
            )
        if "propertyNames" in rest:
            self._names_of(rest["propertyNames"], place, pointer(place, "propertyNames"), more, 0)
        if "minProperties" in rest:
            self._min_properties(rest, place, out, more, done)
        if "maxProperties" in rest:
            self._max_properties(rest, place, out, more, done)

    def _with_named_patterns(self, rest: dict[str, Any]) -> dict[str, Any]:
        """With the names of patterns that have few: where all are used, a grammar would want one more."""
        if "patternProperties" not in rest:
            return rest
        named, patterns = dict(rest.get("properties", {})), dict(rest["patternProperties"])
        for pattern, entry in rest["patternProperties"].items():
            try:
                names = texts_of(rust_pattern(pattern), MAX_NAMED)
            except UnsupportedPattern:
                continue
            if not names or _has_control(names):
                continue
            del patterns[pattern]
            for name in names:
                named[name] = {"allOf": [named[name], entry]} if name in named else entry
        if len(patterns) == len(rest["patternProperties"]):
            return rest
        changed = rest | {"properties": named, "patternProperties": patterns}
        return self._document.copied(changed, rest)

    def _names_of(self, schema: Any, place: str, where: str, more: list[tuple[Any, str]], depth: int) -> None:
        """`propertyNames` as patterns of properties beside which there are no others."""
        if schema is True:
            return
        if schema is False:
            more.append(({"additionalProperties": False}, where))
            return
        if not isinstance(schema, dict):
            raise InvalidSchema(f"#{where} is neither an object nor a bool")
        self._prover.spend(4 + len(schema))
        for keyword, value in schema.items():
            pattern: str | None = None
            if keyword in ANNOTATIONS or is_trivial(keyword, frozenset({"string"})):
                continue
            if keyword == "type" and "string" in kinds_of_type(value):
                continue
            if keyword in ("allOf", "$ref") and depth < 8:
                parts = value if keyword == "allOf" else [self._document.resolve(schema)]
                for part in parts:
                    self._names_of(part, place, where, more, depth + 1)
                continue
            if keyword == "format" and value not in FORMATS | set(_FORMAT_PATTERNS):
                continue
            if keyword in ("enum", "const"):
                values = value if keyword == "enum" else [value]
                names = {name: True for name in values if isinstance(name, str)}
                more.append(({"properties": names, "additionalProperties": False}, where))
                continue
            if keyword == "pattern":
                pattern = value
            elif keyword == "maxLength":
                pattern = f"^[^]{{0,{value}}}$"
            elif keyword == "minLength":
                pattern = f"^[^]{{{value},}}$"
            if pattern is None:
                self._report("propertyNames", place, f"{keyword} of names is not supported")
                continue
            more.append(({"patternProperties": {pattern: True}, "additionalProperties": False}, where))

    def _unevaluated(self, rest: dict[str, Any], place: str, done: list[Any]) -> None:
        """Closed over the names that this schema and those it joins without a choice evaluate."""
        names: dict[str, Any] = {}
        patterns: dict[str, Any] = {}
        if not self._evaluated(rest, names, patterns, 0):
            reason = "it stands beside schemas that may or may not evaluate properties"
            self._report("unevaluatedProperties", place, reason)
            return
        if "" in patterns:  # additionalProperties of a joined schema evaluates all
            return
        translated = {}
        for pattern in patterns:
            found = self._pattern(pattern, "unevaluatedProperties", place)
            if found is not None:
                translated[found] = True
        closed: dict[str, Any] = {"properties": dict.fromkeys(names, True)}
        if translated:
            closed["patternProperties"] = translated
        value = rest["unevaluatedProperties"]
        closed["additionalProperties"] = self._node(value, pointer(place, "unevaluatedProperties"))
        done.append(closed)

    def _evaluated(self, schema: Any, names: dict[str, Any], patterns: dict[str, Any], depth: int) -> bool:
        """Collect what is evaluated; False where it depends on the value."""
        if isinstance(schema, bool):
            return True
        self._prover.spend(4 + len(schema))
        if depth > 16 or set(schema) & {"if", "not", "dependentSchemas", "$dynamicRef"}:
            return False
        for keyword in ("anyOf", "oneOf"):
            for entry in schema.get(keyword, ()):
                found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
                is_known = self._evaluated(entry, *found, depth + 1)
                if not is_known or set(found[0]) - set(names) - set(schema.get("properties", ())) or found[1]:
                    return False
        names.update(dict.fromkeys(schema.get("properties", ())))
        patterns.update(dict.fromkeys(schema.get("patternProperties", ())))
        if "additionalProperties" in schema or (depth and "unevaluatedProperties" in schema):
            patterns[""] = None
        parts = list(schema.get("allOf", ()))
        if "$ref" in schema:
            parts.append(self._document.resolve(schema))
        return all(self._evaluated(part, names, patterns, depth + 1) for part in parts)

    def _sizes(self, rest: dict[str, Any]) -> tuple[list[str], list[str], bool]:
        """Names that must be there, those that may, and whether there are no others."""
        required = list(dict.fromkeys(rest.get("required", ())))
        optional = [
            name
            for name, entry in rest.get("properties", {}).items()
            if name not in required and entry is not False
        ]
        is_closed = rest.get("additionalProperties") is False and not rest.get("patternProperties")
        return required, optional, is_closed

    def _min_properties(
        self, rest: dict[str, Any], place: str, out: dict[str, Any], more: list[Any], done: list[Any]
    ) -> None:
        required, optional, is_closed = self._sizes(rest)
        missing = rest["minProperties"] - len(required)
        if missing <= 0:
            return
        if is_closed:
            if missing > len(optional):
                done.append({"type": [kind for kind in _TYPES if kind != "object"]})
            elif math.comb(len(optional), missing) <= MAX_BRANCHES:
                choices = [{"required": list(names)} for names in combinations(optional, missing)]
                more.append(({"anyOf": choices}, place))
            else:
                self._report("minProperties", place, f"{len(optional)} properties have too many choices")
        elif missing > 1:
            # A grammar would count a key that comes twice.
            self._report(
                "minProperties", place, f"{missing} properties without a fixed name cannot be counted"
            )
        elif not optional and not rest.get("patternProperties"):
            if required:
                names = dict.fromkeys(required, True)
                out.setdefault("properties", {})
                out["properties"] = names | out["properties"]
            out["minProperties"] = rest["minProperties"]
        elif len(optional) < MAX_BRANCHES:
            absent = {"properties": dict.fromkeys(optional, False)}
            least = {"minProperties": rest["minProperties"], "required": required} | (
                {"properties": dict.fromkeys(required, True)} if required else {}
            )
            choices = [{"required": [name]} for name in optional]
            more.append(({"anyOf": [*choices, {"allOf": [absent, least]}]}, place))
        else:
            self._report("minProperties", place, f"{len(optional)} properties have too many choices")

    def _max_properties(
        self, rest: dict[str, Any], place: str, out: dict[str, Any], more: list[Any], done: list[Any]
    ) -> None:
        required, optional, is_closed = self._sizes(rest)
        room = rest["maxProperties"] - len(required)
        if room < 0:
            done.append({"type": [kind for kind in _TYPES if kind != "object"]})
        elif is_closed:
            num_absent = len(optional) - room
            if num_absent <= 0:
                return
            if math.comb(len(optional), num_absent) <= MAX_BRANCHES:
                absent = [
                    {"properties": dict.fromkeys(names, False)}
                    for names in combinations(optional, num_absent)
                ]
                more.append(({"anyOf": absent}, place))
            else:
                self._report("maxProperties", place, f"{len(optional)} properties have too many choices")
        elif not optional and not required:
            out["maxProperties"] = rest["maxProperties"]
        elif not optional:
            out["properties"] = dict.fromkeys(required, True) | out.get("properties", {})
            out["maxProperties"] = rest["maxProperties"]
        elif room == 0:
            names = dict.fromkeys(required, True)
            done.append({"properties": names, "additionalProperties": False})
        else:
            self._report("maxProperties", place, "it stands beside optional and additional properties")

    # Reading

    def _entries(self, value: Any, keyword: str, place: str) -> list[Any]:
        if not isinstance(value, list):
            raise InvalidSchema(f"#{place}: {keyword} is not a list")
        return value

    def _map(self, value: Any, keyword: str, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidSchema(f"#{place}: {keyword} is not an object")
        return value

    def _report(self, keyword: str, place: str, reason: str) -> None:
        self._unenforced.setdefault((keyword, place), Unenforced(keyword, place, reason))


_TYPES = ("null", "boolean", "object", "array", "string", "number")


def _or_other(kind: str, *choices: Any) -> dict[str, Any]:
    """One of the choices, or a value of another type."""
    return {"anyOf": [{"type": [name for name in _TYPES if name != kind]}, *choices]}


def _matches_all(pattern: str) -> bool:
    """Whether a translated pattern is found in every text: the empty match at its start is in all of them."""
    try:
        return "$" not in pattern and bool(re.search(pattern, ""))
    except re.error:
        return False


def _has_control(value: Any) -> bool:
    if isinstance(value, str):
        return not _CONTROLS.isdisjoint(value)
    if isinstance(value, dict):
        return any(_has_control(key) or _has_control(entry) for key, entry in value.items())
    return isinstance(value, list) and any(map(_has_control, value))


__all__ = ["ANNOTATED_FORMATS", "FORMATS", "Rewritten", "Unenforced", "literal", "rewrite"]
