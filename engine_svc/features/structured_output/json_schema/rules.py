"""A rule per keyword: how a schema with this keyword is written in keywords that a backend enforces.

A rule adds parts to the conjunction of its node, or reports the keyword. A new keyword is a rule in RULES.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, permutations
from operator import and_, or_
from typing import Any

from engine_svc.features.structured_output.json_schema.conjunction import Node, Subschema
from engine_svc.features.structured_output.json_schema.document import pointer
from engine_svc.features.structured_output.json_schema.instances import satisfies
from engine_svc.features.structured_output.json_schema.languages import Texts
from engine_svc.features.structured_output.json_schema.logic import (
    ANNOTATIONS,
    UNITS,
    Known,
    Prover,
    is_found,
    is_trivial,
    json_key,
    kind_of,
    kinds_of_type,
    type_of_kinds,
)  # fmt: skip
from engine_svc.features.structured_output.json_schema.negation import CannotNegate, negation
from engine_svc.features.structured_output.json_schema.patterns import (
    UNWRITABLE,
    UnsupportedPattern,
    pattern_without,
    texts_of,
    translated,
)

MAX_BRANCHES = 64  # that one keyword may become
MAX_APART = 4  # patterns of names that are compared with each other
MAX_REFERENCES = 8  # to each other, to a list of values: some never end
MAX_ORDERS = 120  # of the items of an array
MAX_NAMED = 16  # names of a pattern that are written as properties
MAX_DISJOINT = 64  # branches of a oneOf: all pairs are compared
MAX_JOINS = 16  # nested joins of schemas in which evaluated properties are searched
FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # that the backend enforces; the others are annotations, as by the standard every format may be
PLAIN_KEYWORDS = (
    "type", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "required", "minItems", "maxItems",
)  # fmt: skip
IN_PLACE = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf"})
_TYPES = ("null", "boolean", "object", "array", "string", "number")
_NO_OBJECT = {"type": [kind for kind in _TYPES if kind != "object"]}
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


def _values(node: Node, keyword: str) -> None:
    if _has_control(node.keywords[keyword]):
        node.report(keyword, "it has a control character")
    else:
        node.parts.keywords[keyword] = node.keywords[keyword]


def _format(node: Node, keyword: str) -> None:
    form = node.keywords[keyword]
    if form in FORMATS and form != "date":
        node.parts.keywords["format"] = form


def _pattern(node: Node, keyword: str) -> None:
    """The pattern of `pattern`, or of a format that the backend does not enforce or reads differently."""
    pattern = node.keywords[keyword]
    if keyword == "format":
        pattern = _FORMAT_PATTERNS.get(pattern)
    if pattern is None or (translated := node.pattern(pattern, keyword)) is None:
        return
    if "pattern" in node.parts.keywords:
        node.parts.references.append({"pattern": translated})
    else:
        node.parts.keywords["pattern"] = translated


def _part(node: Node, keyword: str) -> None:
    """`items` or `additionalProperties`, with a rewritten schema."""
    node.parts.keywords[keyword] = node.subschema(node.keywords[keyword], keyword)


def _prefix_items(node: Node, keyword: str) -> None:
    node.parts.keywords[keyword] = [
        node.subschema(entry, keyword, index) for index, entry in enumerate(node.keywords[keyword])
    ]


def _unevaluated_items(node: Node, keyword: str) -> None:
    """`unevaluatedItems` as `items`, where no keyword beside it evaluates items."""
    schema = node.keywords[keyword]
    if "items" in node.keywords or schema is True:
        return
    if node.keywords.keys() & {*IN_PLACE, "if", "not", "contains"}:
        node.report(keyword, "it stands beside schemas that evaluate items")
    else:
        node.parts.keywords["items"] = node.subschema(schema, keyword)


def _unique_items(node: Node, keyword: str) -> None:
    """`uniqueItems` left out where other keywords keep the items apart; or as orders of few listed items."""
    if not node.keywords[keyword]:
        return
    prefix = node.keywords.get("prefixItems", [])
    max_items = node.keywords.get("maxItems", math.inf)
    if node.keywords.get("items") is False:
        max_items = min(max_items, len(prefix))
    if max_items <= 1:
        return
    listed = _listed_items(node)
    length = int(min(max_items, len(listed)))
    if listed and math.perm(len(listed), length) <= MAX_ORDERS:
        orders = [
            {"type": "array", "prefixItems": [{"const": item} for item in order], "items": False}
            for order in permutations(listed, length)
        ]
        node.require(_or_other("array", *orders), keyword)
    elif max_items > min(len(prefix), 8) or not all(
        node.prover.is_unsatisfiable(first, second)
        for first, second in combinations(prefix[: int(max_items)], 2)
    ):
        node.report(keyword, "it has no equal in other keywords")


def _listed_items(node: Node) -> list[Any]:
    """The values of `items`, where these are listed."""
    items = node.keywords.get("items")
    for _ in range(MAX_REFERENCES):
        if not isinstance(items, dict) or items.keys() - ANNOTATIONS != {"$ref"}:
            break
        items = node.rewriter.document.resolve(items)
    if not isinstance(items, dict) or "prefixItems" in node.keywords or "enum" not in items:
        return []
    is_one = {json_key(value): satisfies(node.prover, value, items) for value in items["enum"]}
    if None in is_one.values():
        return []
    return list({key: value for value in items["enum"] if is_one[key := json_key(value)]}.values())


def _contains(node: Node, keyword: str) -> None:
    """`contains` of one item; as a number of items, where each matches; or as no match."""
    schema, low, high = (
        node.keywords[keyword], node.keywords.get("minContains", 1), node.keywords.get("maxContains"),
    )  # fmt: skip
    if high is None and low == 0:
        return
    if high is not None and high < low:
        node.require(_or_other("array"))
    elif _matches_each_item(node, schema):
        limits = {"type": "array", "minItems": low} | ({} if high is None else {"maxItems": high})
        node.require(_or_other("array", limits))
    elif high is None and low == 1:
        node.parts.keywords[keyword] = node.subschema(schema, keyword)
    elif high == 0:
        _require_negation(
            node,
            keyword,
            lambda: _or_other("array", {"type": "array", "items": negation(node.prover, schema)}),
        )
    else:
        node.report(keyword, "it has no equal in other keywords")


def _matches_each_item(node: Node, schema: Any) -> bool:
    keys = {json_key(schema), json_key(node.keywords.get("items", {}))}
    return "prefixItems" not in node.keywords and (len(keys) == 1 or keys == {"{}", "true"})


def with_named_patterns(node: Node) -> Node:
    """The node with patterns of few names as properties, and others without names in common.

    A grammar wants one more name of a pattern even where all of them are used.
    """
    patterns = node.keywords.get("patternProperties", {})
    if len(patterns) > 1 or (patterns and "propertyNames" in node.keywords):
        node = _with_patterns_apart(node)
        patterns = node.keywords["patternProperties"]
    names_of = {pattern: names for pattern in patterns if (names := _names_of(pattern))}
    if not names_of:
        return node
    properties = dict(node.keywords.get("properties", {}))
    for pattern, names in names_of.items():
        entry = patterns[pattern]
        for name in names:
            properties[name] = {"allOf": [properties[name], entry]} if name in properties else entry
    others = {pattern: entry for pattern, entry in patterns.items() if pattern not in names_of}
    return node.with_keywords(node.keywords | {"properties": properties, "patternProperties": others})


def _with_patterns_apart(node: Node) -> Node:
    """The node with patterns without names in common, which are within those of `propertyNames`."""
    keywords = node.keywords
    patterns, named = keywords["patternProperties"], keywords.get("properties", {})
    limits = _limits_of_names(node) if "propertyNames" in keywords else []
    if len(patterns) > MAX_APART or any("properties" in limit for limit in limits):
        return node
    apart: list[tuple[Texts, list[Any]]] = []
    try:
        for pattern, entry in patterns.items():
            own, parts = Texts.of(pattern), []
            rest = own
            for texts, entries in apart:
                if node.prover.pattern_of(texts & own) is None:
                    parts.append((texts, entries))
                else:
                    rest = rest & ~texts
                    parts += [(texts & own, [*entries, entry]), (texts & ~own, entries)]
            apart = [*parts, (rest, [entry])]
        if len(apart) == len(patterns) and not limits:
            return node
        if limits:
            within = reduce(and_, (Texts.of(limit["pattern"]) for limit in limits))
            # additionalProperties says nothing of names that properties or a pattern has.
            others = ~reduce(or_, map(Texts.of, patterns)) & Texts.of(pattern_without(named))
            apart.append((others, [keywords.get("additionalProperties", True)]))
            apart = [(texts & within, entries) for texts, entries in apart]
        written = {node.prover.pattern_of(texts): entries for texts, entries in apart}
    except UnsupportedPattern:
        return node
    changed = {
        pattern: entries[0] if len(entries) == 1 else {"allOf": entries}
        for pattern, entries in written.items()
        if pattern is not None
    }
    keywords = keywords | {"patternProperties": changed}
    if limits:
        found = {name: [is_found(limit["pattern"], name) for limit in limits] for name in named}
        if "unevaluatedProperties" in keywords or any(None in one for one in found.values()):
            return node
        del keywords["propertyNames"]
        keywords["additionalProperties"] = False
        if named:
            keywords["properties"] = {name: all(found[name]) and entry for name, entry in named.items()}
    return node.with_keywords(keywords)


def _names_of(pattern: str) -> list[str]:
    """All names that a pattern has, if they are few and can be written."""
    try:
        names = texts_of(translated(pattern), MAX_NAMED)
    except UnsupportedPattern:
        return []
    return [] if _has_control(names) else names


def _properties(node: Node, keyword: str) -> None:
    properties = node.parts.keywords[keyword] = {}
    for name, entry in node.keywords[keyword].items():
        properties[name] = node.subschema(entry, keyword, name)
        if _has_control(name):
            node.report(keyword, "a name has a control character")


def _pattern_properties(node: Node, keyword: str) -> None:
    has_others = bool(node.keywords.keys() & {"additionalProperties", "unevaluatedProperties"})
    patterns: dict[str, Any] = {}
    for_all: dict[str, Any] = {}
    for pattern, entry in node.keywords[keyword].items():
        if entry in (True, {}) and not has_others:
            continue
        translated = node.pattern(pattern, keyword)
        if translated is None:
            continue
        if not _matches_all(translated):
            patterns[translated] = node.subschema(entry, keyword, pattern)
            continue
        for_all[pattern] = entry
        if has_others:
            patterns[translated] = True
    if patterns:
        node.parts.keywords[keyword] = patterns
    for pattern, entry in for_all.items():
        _all_properties(node, pattern, entry)


def _all_properties(node: Node, pattern: str, entry: Any) -> None:
    """A pattern of all names as `additionalProperties`, beside which backends keep other patterns apart."""
    named = node.keywords.get("properties", {}).values()
    is_implied = all(node.prover.implies(value, entry) for value in named)
    is_alone = len(node.keywords["patternProperties"]) == 1 and "additionalProperties" not in node.keywords
    if is_implied and is_alone:
        node.parts.keywords["additionalProperties"] = node.subschema(entry, "patternProperties", pattern)
    else:
        node.require({"additionalProperties": entry}, "patternProperties", pattern)


def _unevaluated_properties(node: Node, keyword: str) -> None:
    """`unevaluatedProperties` as `additionalProperties`, beside names that are evaluated in any value."""
    schema = node.keywords[keyword]
    if "additionalProperties" in node.keywords or schema is True:
        return
    evaluated = _Evaluated({}, {})
    if not _evaluate(node, node.keywords, evaluated, 0):
        node.report(keyword, "it stands beside schemas that may or may not evaluate properties")
    elif not evaluated.has_all:
        patterns = [node.pattern(pattern, keyword) for pattern in evaluated.patterns]
        closure: dict[str, Any] = {"properties": dict.fromkeys(evaluated.names, True)}
        if translated := {pattern: True for pattern in patterns if pattern is not None}:
            closure["patternProperties"] = translated
        closure["additionalProperties"] = node.subschema(schema, keyword)
        node.parts.closures.append(closure)


@dataclass(slots=True)
class _Evaluated:
    """Properties that schemas evaluate in any value; names and patterns in the order of the text."""

    names: dict[str, None]
    patterns: dict[str, None]
    has_all: bool = False


def _evaluate(node: Node, schema: Any, evaluated: _Evaluated, depth: int) -> bool:
    """Collect the properties that a schema evaluates; False where they depend on the value."""
    if isinstance(schema, bool):
        return True
    node.prover.spend(4 + len(schema))
    if depth > MAX_JOINS or schema.keys() & {"if", "not", "dependentSchemas", "$dynamicRef"}:
        return False
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        chosen = _Evaluated({}, {})
        if not _evaluate(node, branch, chosen, depth + 1) or chosen.patterns or chosen.has_all:
            return False
        if chosen.names.keys() - evaluated.names.keys() - schema.get("properties", {}).keys():
            return False
    evaluated.names.update(dict.fromkeys(schema.get("properties", ())))
    evaluated.patterns.update(dict.fromkeys(schema.get("patternProperties", ())))
    if (
        "additionalProperties" in schema
        or "" in evaluated.patterns
        or (depth and "unevaluatedProperties" in schema)
    ):
        evaluated.has_all = True
    joined = list(schema.get("allOf", ()))
    if "$ref" in schema:
        joined.append(node.rewriter.document.resolve(schema))
    return all(_evaluate(node, entry, evaluated, depth + 1) for entry in joined)


def _dependent_required(node: Node, keyword: str) -> None:
    for name, names in node.keywords[keyword].items():
        node.require({"anyOf": [{"properties": {name: False}}, {"required": [name, *names]}]})


def _dependent_schemas(node: Node, keyword: str) -> None:
    for name, entry in node.keywords[keyword].items():
        present = {"required": [name], "allOf": [entry]}
        node.require({"anyOf": [{"properties": {name: False}}, present]}, keyword, name)


def _property_names(node: Node, keyword: str) -> None:
    """Names that satisfy a schema, as properties and patterns beside which there are no others."""
    limits = _limits_of_names(node)
    for limit in limits:
        if "properties" in limit:
            node.require(limit | {"additionalProperties": False}, keyword)
    if patterns := [limit["pattern"] for limit in limits if "pattern" in limit]:
        try:
            joined = patterns[0]
            if len(patterns) > 1:
                joined = node.prover.pattern_of(reduce(and_, map(Texts.of, patterns))) or "[]"
            node.require({"patternProperties": {joined: True}, "additionalProperties": False}, keyword)
        except UnsupportedPattern as error:
            node.report(keyword, f"{error} is not supported")


def _limits_of_names(node: Node) -> list[dict[str, Any]]:
    """What `propertyNames` says: `properties` or a `pattern` each."""
    limits: list[dict[str, Any]] = []
    _limit_names(node, node.keywords["propertyNames"], limits, 0)
    return limits


def _limit_names(node: Node, schema: Any, limits: list[dict[str, Any]], depth: int) -> None:
    if schema is False:
        limits.append({"properties": {}})
    if isinstance(schema, bool):
        return
    node.prover.spend(4 + len(schema))
    for keyword, value in schema.items():
        if keyword in ("allOf", "$ref") and depth < 8:
            for part in value if keyword == "allOf" else [node.rewriter.document.resolve(schema)]:
                _limit_names(node, part, limits, depth + 1)
        elif keyword == "not" and depth < 8:
            _limit_names(node, _other_names(node, value), limits, depth + 1)
        elif keyword == "anyOf" and len(value) == 1 and depth < 8:
            _limit_names(node, value[0], limits, depth + 1)
        elif not _takes_all_names(keyword, value):
            if (names := _names(keyword, value)) is None:
                node.report("propertyNames", f"{keyword} of names is not supported")
            else:
                limits.append(names)


def _other_names(node: Node, schema: Any) -> Any:
    try:
        return negation(node.prover, schema, Known(frozenset({"string"})))
    except CannotNegate as error:
        node.report("propertyNames", f"{error} cannot be negated")
        return True


def _takes_all_names(keyword: str, value: Any) -> bool:
    match keyword:
        case "type":
            return "string" in kinds_of_type(value)
        case "format":
            return value not in FORMATS | _FORMAT_PATTERNS.keys()
    return keyword in ANNOTATIONS or is_trivial(keyword, frozenset({"string"}))


def _names(keyword: str, value: Any) -> dict[str, Any] | None:
    """The names that satisfy a keyword as properties or a pattern of them."""
    match keyword:
        case "const" | "enum":
            values = value if keyword == "enum" else [value]
            return {"properties": {name: True for name in values if isinstance(name, str)}}
        case "pattern":
            return {"pattern": value}
        case "maxLength":
            return {"pattern": f"^[^]{{0,{value}}}$"}
        case "minLength":
            return {"pattern": f"^[^]{{{value},}}$"}
    return None


@dataclass(frozen=True, slots=True)
class _Names:
    """Names that an object must have, those it may have, and whether it has no others."""

    required: list[str]
    optional: list[str]
    is_closed: bool

    def counted(self, node: Node, keyword: str) -> dict[str, Any]:
        """The backend's own count, which wants required names among `properties`."""
        named = {"properties": dict.fromkeys(self.required, True)} if self.required else {}
        return {keyword: node.keywords[keyword], **named}

    @classmethod
    def of(cls, keywords: dict[str, Any]) -> _Names:
        required = list(dict.fromkeys(keywords.get("required", ())))
        properties = keywords.get("properties", {})
        optional = [name for name in properties if name not in required and properties[name] is not False]
        is_closed = keywords.get("additionalProperties") is False and not keywords.get("patternProperties")
        return cls(required, optional, is_closed)


def _min_properties(node: Node, keyword: str) -> None:
    """`minProperties` as a choice of optional names, or as the backend's own count where none is optional."""
    names = _Names.of(node.keywords)
    num_missing = node.keywords[keyword] - len(names.required)
    too_many = f"{len(names.optional)} properties have too many choices"
    if num_missing <= 0:
        return
    if names.is_closed:
        if num_missing > len(names.optional):
            node.parts.closures.append(_NO_OBJECT)
        elif math.comb(len(names.optional), num_missing) <= MAX_BRANCHES:
            choices = combinations(names.optional, num_missing)
            node.require({"anyOf": [{"required": list(choice)} for choice in choices]})
        else:
            node.report(keyword, too_many)
    elif num_missing > 1:
        # A grammar would count a key that comes twice.
        node.report(keyword, f"{num_missing} properties without a fixed name cannot be counted")
    elif not names.optional and not node.keywords.get("patternProperties"):
        node.parts.closures.append(names.counted(node, keyword))
    elif len(names.optional) < MAX_BRANCHES:
        others = {"minProperties": node.keywords[keyword], "required": names.required}
        if names.required:
            others["properties"] = dict.fromkeys(names.required, True)
        absent = {"properties": dict.fromkeys(names.optional, False)}
        present = [{"required": [name]} for name in names.optional]
        node.require({"anyOf": [*present, {"allOf": [absent, others]}]})
    else:
        node.report(keyword, too_many)


def _max_properties(node: Node, keyword: str) -> None:
    """`maxProperties` as a choice of absent names, or as the backend's own count where none is optional."""
    names = _Names.of(node.keywords)
    room = node.keywords[keyword] - len(names.required)
    num_absent = len(names.optional) - room
    if room < 0:
        node.parts.closures.append(_NO_OBJECT)
    elif names.is_closed:
        if num_absent <= 0:
            return
        if math.comb(len(names.optional), num_absent) <= MAX_BRANCHES:
            choices = combinations(names.optional, num_absent)
            node.require({"anyOf": [{"properties": dict.fromkeys(choice, False)} for choice in choices]})
        else:
            node.report(keyword, f"{len(names.optional)} properties have too many choices")
    elif not names.optional:
        node.parts.closures.append(names.counted(node, keyword))
    elif room == 0:
        node.parts.closures.append(
            {"properties": dict.fromkeys(names.required, True), "additionalProperties": False}
        )
    else:
        node.report(keyword, "it stands beside optional and additional properties")


def _join(node: Node, keyword: str) -> None:
    document = node.rewriter.document
    target = document.resolve(node.keywords, keyword)
    if isinstance(target, bool) or (node.is_inlined and document.is_recursive(target)):
        node.parts.joined.append(Subschema(target, node.place))
    else:
        node.parts.references.append(node.rewriter.reference(target))


def _recursive_ref(node: Node, keyword: str) -> None:
    node.report(keyword, "it is not supported")


def _all_of(node: Node, keyword: str) -> None:
    """`allOf`, each entry rewritten for values that satisfy the others, so that fewer branches overlap."""
    entries = _with_cases(node.keywords[keyword])
    own = node.without(keyword)
    for index, entry in enumerate(entries):
        beside = {"allOf": [own, *entries[:index], *entries[index + 1 :]]}
        node.parts.joined.append(Subschema(entry, pointer(node.place, keyword, index), beside))


@dataclass(frozen=True, slots=True)
class _Case:
    """An `if` about the values of one property, with its `then` and `else`."""

    values: list[Any]
    then: Any
    other: Any


def _with_cases(entries: list[Any]) -> list[Any]:
    """The entries of an `allOf`, those with an `if` about the same property as one choice of its value.

    Each alone is a choice of two, and a grammar has the product of them all.
    """
    groups: dict[tuple[str, bool, bool], list[int]] = {}
    cases: dict[int, _Case] = {}
    for index, entry in enumerate(entries):
        if (read := _case(entry)) is not None:
            key, cases[index] = read
            groups.setdefault(key, []).append(index)
    joined = list(entries)
    for (name, is_required, is_object), indices in groups.items():
        values = [json_key(value) for index in indices for value in cases[index].values]
        if len(indices) > 1 and len(set(values)) == len(values) <= MAX_BRANCHES:
            joined[indices[0]] = _choice_of(name, is_required, is_object, [cases[index] for index in indices])
            for index in indices[1:]:
                joined[index] = True
    return [entry for entry in joined if entry is not True]


def _case(entry: Any) -> tuple[tuple[str, bool, bool], _Case] | None:
    """The case of an entry, by the property and by whether its absence and other types fail the condition."""
    if not isinstance(entry, dict) or entry.keys() - ANNOTATIONS - {"if", "then", "else"}:
        return None
    condition = entry.get("if")
    if not isinstance(condition, dict) or condition.get("type", "object") != "object":
        return None
    properties, required = condition.get("properties", {}), condition.get("required", [])
    if condition.keys() - ANNOTATIONS - {"properties", "required", "type"} or len(properties) != 1:
        return None
    ((name, schema),) = properties.items()
    if not isinstance(schema, dict) or len(schema.keys() & {"const", "enum"}) != 1 or set(required) - {name}:
        return None
    values = schema.get("enum", [schema.get("const")])
    if schema.keys() - ANNOTATIONS - {"const", "enum", "type"} or any(
        "type" in schema and kind_of(value) not in kinds_of_type(schema["type"]) for value in values
    ):
        return None
    case = _Case(values, entry.get("then", True), entry.get("else", True))
    return (name, bool(required), "type" in condition), case


def _choice_of(name: str, is_required: bool, is_object: bool, cases: list[_Case]) -> dict[str, Any]:
    """The conjunction of cases of a property, none of which have a value in common."""
    others = [case.other for case in cases]
    all_then, all_others = {"allOf": [case.then for case in cases]}, {"allOf": others}
    values = [value for case in cases for value in case.values]
    branches = [
        {
            "allOf": [
                {"type": "object", "properties": {name: {"enum": case.values}}, "required": [name]},
                case.then,
                *others[:index],
                *others[index + 1 :],
            ]
        }
        for index, case in enumerate(cases)
    ]
    other = {"type": "object", "properties": {name: {"not": {"enum": values}}}, "required": [name]}
    absent = {"type": "object", "properties": {name: False}}
    return {
        "anyOf": [
            *branches,
            {"allOf": [other, all_others]},
            {"allOf": [absent, all_others if is_required else all_then]},
            {"allOf": [_NO_OBJECT, all_others if is_object else all_then]},
        ]
    }


def _any_of(node: Node, keyword: str) -> None:
    node.parts.alternatives = [
        Subschema(entry, pointer(node.place, keyword, index))
        for index, entry in enumerate(node.keywords[keyword])
    ]


def _one_of(node: Node, keyword: str) -> None:
    """`oneOf` as `anyOf` of branches, each without the values of those that it overlaps."""
    base = node.context(keyword)
    branches = [entry for entry in node.keywords[keyword] if not node.prover.is_unsatisfiable(base, entry)]
    if len(branches) > MAX_DISJOINT:
        node.report(keyword, f"it has {len(branches)} branches, {MAX_DISJOINT} are compared")
    else:
        try:
            within = node.prover.kinds(base)
            parts = [_exclusive(node.prover, base, within, branches, index) for index in range(len(branches))]
            branches = [part for parts_of_branch in parts for part in parts_of_branch] or [False]
        except CannotNegate as error:
            node.report(keyword, f"its branches may overlap: {error} cannot be negated")
    node.require({"anyOf": branches}, keyword)


def _exclusive(
    prover: Prover, base: Any, within: frozenset[str], branches: list[Any], index: int
) -> list[Any]:
    """A branch without what it shares with others; apart by type, as many overlap only in some."""
    branch = branches[index]
    rivals = [
        number
        for number, other in enumerate(branches)
        if number != index and not prover.is_unsatisfiable(base, branch, other)
    ]
    if not rivals:
        return [branch]
    kinds_by_rivals: dict[tuple[int, ...], frozenset[str]] = {}
    for unit in UNITS:
        kinds = within & unit
        only = {"type": type_of_kinds(kinds)}
        if not kinds or prover.is_unsatisfiable(base, branch, only):
            continue
        shared = tuple(
            number for number in rivals if not prover.is_unsatisfiable(base, branch, branches[number], only)
        )
        kinds_by_rivals[shared] = kinds_by_rivals.get(shared, frozenset()) | kinds
    if set(kinds_by_rivals) == {()}:
        return [branch]
    parts = []
    for shared, kinds in kinds_by_rivals.items():
        known = prover.known(base, branch, {"type": type_of_kinds(kinds)})
        negated = [negation(prover, branches[number], known) for number in shared]
        if False not in negated and known.kinds:
            parts.append({"allOf": [{"type": type_of_kinds(known.kinds)}, branch, *negated]})
    return parts


def _not(node: Node, keyword: str) -> None:
    schema, base = node.keywords[keyword], node.context(keyword, "if", "then", "else")
    if not node.prover.is_unsatisfiable(base, schema):
        known = node.prover.known(base)
        _require_negation(node, keyword, lambda: negation(node.prover, schema, known))


def _if(node: Node, keyword: str) -> None:
    """`if` as `anyOf` of the condition with `then`, and of its negation with `else`."""
    condition, then, other = (node.keywords.get(name, True) for name in ("if", "then", "else"))
    if then is True and other is True:
        return
    known = node.prover.known(node.context("not", keyword, "then", "else"))

    def branches() -> Any:
        negated = negation(node.prover, condition, known)
        first = condition if then is True else {"allOf": [condition, then]}
        return {"anyOf": [first, {"allOf": [negated, other]}]}

    _require_negation(node, keyword, branches)


def _require_negation(node: Node, keyword: str, equivalent: Callable[[], Any]) -> None:
    try:
        node.require(equivalent(), keyword)
    except CannotNegate as error:
        node.report(keyword, f"{error} cannot be negated")


# In the order in which they run, and report.
RULES: tuple[tuple[str, Callable[[Node, str], None]], ...] = (
    ("const", _values),
    ("enum", _values),
    ("format", _format),
    ("pattern", _pattern),
    ("format", _pattern),
    ("prefixItems", _prefix_items),
    ("items", _part),
    ("unevaluatedItems", _unevaluated_items),
    ("uniqueItems", _unique_items),
    ("contains", _contains),
    ("properties", _properties),
    ("patternProperties", _pattern_properties),
    ("additionalProperties", _part),
    ("unevaluatedProperties", _unevaluated_properties),
    ("dependentRequired", _dependent_required),
    ("dependentSchemas", _dependent_schemas),
    ("propertyNames", _property_names),
    ("minProperties", _min_properties),
    ("maxProperties", _max_properties),
    ("$ref", _join),
    ("$dynamicRef", _join),
    ("$recursiveRef", _recursive_ref),
    ("allOf", _all_of),
    ("oneOf", _one_of),
    ("not", _not),
    ("if", _if),
    ("anyOf", _any_of),
)


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
        return not UNWRITABLE.isdisjoint(value)
    if isinstance(value, dict):
        return any(_has_control(key) or _has_control(entry) for key, entry in value.items())
    return isinstance(value, list) and any(map(_has_control, value))
