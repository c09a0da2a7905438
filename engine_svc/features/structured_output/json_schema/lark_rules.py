"""JSON schemas as rules of a Lark grammar, for what llguidance's own form of a schema does not keep.

llguidance reads numbers as doubles, writes only some of those between fractional bounds, and ignores
`contains`. Such numbers become terminals here, such arrays rules, and so do arrays and objects on the way to
them; other parts are `%json`, as a whole schema is otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cache
from itertools import combinations
from typing import Any

from engine_svc.features.structured_output.json_schema.document import InvalidSchema, SchemaTooLarge, pointer
from engine_svc.features.structured_output.json_schema.logic import NUMBER_KEYWORDS
from engine_svc.features.structured_output.json_schema.numbers import (
    BOUNDS,
    MAX_WHOLE,
    UnsupportedNumbers,
    is_double,
    is_number,
    is_read_exactly,
)
from engine_svc.features.structured_output.json_schema.patterns import (
    pattern_without,
    translated,
)
from engine_svc.features.structured_output.json_schema.shapes import (
    Anything,
    ArrayShape,
    Choice,
    Fixed,
    NumberShape,
    ObjectShape,
    Reference,
    Shape,
    Shapes,
    TextShape,
    UnsupportedShape,
    choice,
    is_nothing,
    text_shape,
)
from engine_svc.features.structured_output.limits import subschemas
from triptych_kit.exact_json import dumps

MAX_CONTAINED = 3  # schemas of items that one array contains
MAX_COUNTED = 32  # items of an array that are counted beside them
MAX_MEMBERS = 2_000  # named ones of one object
_BESIDE = "it stands beside numbers that need another form"
_STRING = r'/"(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/'


def needs_rules(document: Any) -> bool:
    """Whether llguidance's own form of a rewritten schema has other numbers or arrays, or not all of them."""
    for schema in _schemas_in(document):
        if "contains" in schema:
            return True
        for name, value in schema.items():
            if name in NUMBER_KEYWORDS and is_number(value) and not _is_whole(value):
                return True
            if name in ("const", "enum") and not all(map(is_double, _numbers_in(value))):
                return True
    return False


def is_within(document: Any) -> bool:
    """Whether llguidance's own form of a rewritten schema has no other numbers or arrays, if not all."""
    bounds: list[tuple[str, Any]] = []
    for schema in _schemas_in(document):
        if "contains" in schema:
            return False
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int | Decimal) and not is_read_exactly(multiple):
            return False
        values = [value for name, value in schema.items() if name in ("const", "enum")]
        bounds += [(name, schema[name]) for name in BOUNDS if name in schema]
        if not all(map(is_double, _numbers_in([*values, *[bound for _, bound in bounds]]))):
            return False
    # It takes 0 for a number above 0 where another bound is below 1.
    has_fractions = any(isinstance(bound, Decimal) for _, bound in bounds)
    has_open = any(name.startswith("exclusive") and isinstance(bound, int) for name, bound in bounds)
    return not (has_fractions and has_open)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and abs(value) <= MAX_WHOLE


def _schemas_in(document: Any) -> Iterator[dict[str, Any]]:
    open_values = [document]
    while open_values:
        part = open_values.pop()
        if isinstance(part, list):
            open_values += part
        elif isinstance(part, dict):
            yield part
            open_values += subschemas(part)


def _numbers_in(value: Any) -> Iterator[Any]:
    open_values = [value]
    while open_values:
        part = open_values.pop()
        if isinstance(part, dict | list):
            open_values += part.values() if isinstance(part, dict) else part
        elif is_number(part):
            yield part


class SchemaRules:
    """The rules of one document; `start` is the first."""

    def __init__(
        self,
        document: dict[str, Any],
        options: Mapping[str, Any],
        check: Callable[[dict[str, Any]], None] = lambda schema: None,
    ) -> None:
        """options: of llguidance for JSON. check: raises for a schema that costs too much.

        Raises UnsupportedShape, SchemaTooLarge.
        """
        self._options = options
        self._check = check
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # of rules and terminals, by their content
        self._separators = [options.get("item_separator"), options.get("key_separator")]
        self._shapes = Shapes(document)
        if is_nothing(self._shapes.root):
            raise InvalidSchema("json_schema is satisfied by no value")
        self._exact = self._definitions_with_exact_numbers()
        self._is_exact: dict[Shape, bool] = {}  # of the shapes that were looked at
        for name in self._exact:
            written = self._written(self._shapes.definitions[name], pointer("", "$defs", name))
            self._rules.append(f"{self._name_of(name)}: {written}")
        self._start = self._written(self._shapes.root, "")

    def text(self) -> str:
        pattern = self._options.get("whitespace_pattern")
        skip = ['%llguidance {"ignore_once": true}', f"%ignore /{slashed(pattern)}/"] if pattern else []
        return "\n".join([*skip, f"start: {self._start}", *self._rules, ""])

    def _definitions_with_exact_numbers(self) -> list[str]:
        definitions = self._shapes.definitions
        exact: list[str] = []
        while more := [
            name
            for name, shape in definitions.items()
            if name not in exact and self._has_exact_numbers(shape, exact)
        ]:
            exact += more
        return exact

    def _has_exact_numbers(self, shape: Shape, exact: list[str]) -> bool:
        """Whether numbers in a shape need terminals."""
        match shape:
            case NumberShape():
                return shape.numbers.keywords() is None
            case Reference():
                return shape.name in exact
            case Choice():
                parts: list[Shape] = [*shape.shapes]
            case ArrayShape() if shape.contained:
                return True
            case ArrayShape():
                parts = [*shape.prefix, shape.items]
            case ObjectShape():
                parts = [*shape.properties.values(), *shape.patterns.values(), shape.additional]
            case _:
                return False
        return any(self._has_exact_numbers(part, exact) for part in parts)

    def _needs_rules(self, shape: Shape) -> bool:
        if shape not in self._is_exact:
            self._is_exact[shape] = self._has_exact_numbers(shape, self._exact)
        return self._is_exact[shape]

    def _written(self, shape: Shape, place: str) -> str:
        """The shape as a part of a rule. place: pointer, for refusals."""
        if not self._needs_rules(shape):
            return self._json(shape)
        match shape:
            case NumberShape():
                return self._number(shape, place)
            case Reference():
                return self._name_of(shape.name)
            case Choice():
                exact = [part for part in shape.shapes if self._needs_rules(part)]
                inexact = [part for part in shape.shapes if not self._needs_rules(part)]
                written = [self._written(part, place) for part in exact]
                written += [self._json(choice(inexact))] if inexact else []
                return f"({' | '.join(written)})"
            case ArrayShape():
                return self._rule("array", self._array(shape, place))
            case ObjectShape():
                return self._rule("object", self._object(shape, place))
        raise AssertionError("other shapes need no rules")

    def _rule(self, kind: str, content: str) -> str:
        """The name of a rule or terminal with the content."""
        key = f"{kind} {content}"
        if key not in self._names:
            self._names[key] = f"{kind}_{len(self._names)}"
            self._rules.append(f"{self._names[key]}: {content}")
        return self._names[key]

    def _name_of(self, definition: str) -> str:
        return f"definition_{definition}"

    def _json(self, shape: Shape) -> str:
        names: set[str] = set()
        schema = self._schema(shape, names)
        schema = {} if schema is True else {"anyOf": []} if schema is False else dict(schema)
        definitions: dict[str, Any] = {}
        while missing := sorted(names - definitions.keys()):
            for name in missing:
                definitions[name] = self._schema(self._shapes.definitions[name], names)
        if definitions:
            schema["$defs"] = definitions
        self._check(schema)
        return self._rule("json", f"%json {dumps(schema | {'x-guidance': dict(self._options)})}")

    def _schema(self, shape: Shape, names: set[str]) -> Any:
        """The shape as a schema; names of definitions are added to `names`."""
        match shape:
            case Anything():
                return True
            case Fixed():
                return {"enum": sorted(shape.values, key=repr)}
            case NumberShape():
                return shape.numbers.keywords()
            case TextShape():
                kinds = [dict(schema) for schema in shape.schemas]
                return {"type": "string"} | (
                    kinds[0] if len(kinds) == 1 else {"allOf": kinds} if kinds else {}
                )
            case Reference():
                names.add(shape.name)
                return {"$ref": f"#/$defs/{shape.name}"}
            case Choice():
                return (
                    {"anyOf": [self._schema(part, names) for part in shape.shapes]} if shape.shapes else False
                )
            case ArrayShape():
                limits = {"minItems": shape.low, "maxItems": shape.high}
                prefix = [self._schema(part, names) for part in shape.prefix]
                return (
                    {"type": "array", "items": self._schema(shape.items, names)}
                    | ({"prefixItems": prefix} if prefix else {})
                    | {name: limit for name, limit in limits.items() if limit}
                    | ({"maxItems": 0} if shape.high == 0 else {})
                )
            case ObjectShape():
                limits = {"minProperties": shape.low or None, "maxProperties": shape.high}
                return {
                    "type": "object",
                    "properties": {
                        name: self._schema(part, names) for name, part in shape.properties.items()
                    },
                    # One without a value would rule out the properties that have such a name.
                    "patternProperties": {
                        pattern: self._schema(part, names)
                        for pattern, part in shape.patterns.items()
                        if not (is_nothing(part) and is_nothing(shape.additional))
                    },
                    "additionalProperties": self._schema(shape.additional, names),
                    "required": list(shape.required),
                } | {name: limit for name, limit in limits.items() if limit is not None}

    def _number(self, shape: NumberShape, place: str) -> str:
        try:
            patterns = shape.numbers.patterns()
        except UnsupportedNumbers as error:
            raise UnsupportedShape("multipleOf", str(error), place) from None
        return self._rule("NUMBER", " & ".join(f"/{pattern}/" for pattern in patterns))

    @property
    def _comma(self) -> str:
        return self._separator(0, ",")

    @property
    def _colon(self) -> str:
        return self._separator(1, ":")

    def _separator(self, index: int, plain: str) -> str:
        pattern = self._separators[index]
        return f'"{plain}"' if pattern is None else self._rule("SEPARATOR", f"/{slashed(pattern)}/")

    def _array(self, shape: ArrayShape, place: str) -> str:
        if shape.contained:
            return self._containing_array(shape, place)
        prefix = shape.prefix if shape.high is None else shape.prefix[: shape.high]
        num_prefix = len(prefix)
        items = pointer(place, "items")
        rest = ""
        if shape.high is None or shape.high > num_prefix:
            low = max(0, shape.low - num_prefix)
            high = None if shape.high is None else shape.high - num_prefix
            item = self._written(shape.items, items)
            if num_prefix:
                rest = _repeated(f"{self._comma} {item}", low, high)
            else:
                more = _repeated(f"{self._comma} {item}", max(0, low - 1), None if high is None else high - 1)
                rest = f"{item} {more}" if low else f"({item} {more})?"
        for index in reversed(range(num_prefix)):
            item = self._written(prefix[index], pointer(place, "prefixItems", index))
            one = f"{self._comma} {item} {rest}" if index else f"{item} {rest}"
            rest = one if index < shape.low else f"({one})?"
            if index % 8 == 7:
                rest = self._rule("items", rest or '""')
        return f'"[" {rest} "]"'

    def _containing_array(self, shape: ArrayShape, place: str) -> str:
        """An array with items of some shapes: a rule for each position and set of missing ones."""
        end = max(len(shape.prefix), shape.low, shape.high or 0, 1)  # from there on positions are alike
        if len(shape.contained) > MAX_CONTAINED or end > MAX_COUNTED:
            raise UnsupportedShape("contains", "its array has too many schemas or items to count", place)

        def item(index: int, found: Iterable[int]) -> str | None:
            value = shape.prefix[index] if index < len(shape.prefix) else shape.items
            for number in found:
                value = self._shapes.both(value, shape.contained[number])
            if is_nothing(value):
                return None
            written = self._written(value, pointer(place, "items"))
            return f"{self._comma} {written}" if index else written

        @cache
        def rest(index: int, missing: frozenset[int]) -> str | None:
            """The items from a position on; None if there are no such items."""
            if index == shape.high:
                return None if missing else '""'
            choices = ['""'] if not missing and index >= shape.low else []
            before = ""
            if index == end and (any_item := item(index, ())):
                before = f"({any_item})*"
            for size in range(index == end, len(missing) + 1):
                for found in combinations(sorted(missing), size):
                    one, behind = item(index, found), rest(min(index + 1, end), missing - set(found))
                    if one is not None and behind is not None:
                        choices.append(f"{one} {behind}")
            return self._rule("items", f"{before} ({' | '.join(choices)})") if choices else None

        items = rest(0, frozenset(range(len(shape.contained))))
        if items is None:
            raise UnsupportedShape("contains", "no array has items of all its schemas", place)
        return f'"[" {items} "]"'

    def _object(self, shape: ObjectShape, place: str) -> str:
        names = dict.fromkeys([*shape.properties, *shape.required])
        if len(names) > MAX_MEMBERS:
            raise SchemaTooLarge(f"properties has {len(names)} entries, {MAX_MEMBERS} are allowed")
        members: list[tuple[str, bool]] = []
        for name in names:
            value = shape.property(name)
            if not is_nothing(value):
                written = self._written(value, pointer(place, "properties", name))
                members.append((f"{_key(name)} {self._colon} {written}", name in shape.required))
        num_optional = sum(not is_required for _, is_required in members)
        if num_optional and (shape.low > len(shape.required) or shape.high is not None):
            raise UnsupportedShape("minProperties", _BESIDE, place)
        others = self._others(shape, list(names), place)
        low = max(0, shape.low - len(shape.required))
        high = None if shape.high is None else shape.high - len(shape.required)
        rests = {is_behind: self._rest(others, is_behind, low, high) for is_behind in (False, True)}
        for member, is_required in reversed(members):
            behind, first = rests[True], rests[False]
            if is_required:
                rests = {True: f"{self._comma} {member} {behind}", False: f"{member} {behind}"}
            else:
                rests = {
                    True: f"({self._comma} {member})? {behind}",
                    False: f"({member} {behind} | {first})" if first else f"({member} {behind})?",
                }
            rests = {side: self._rule("members", text) for side, text in rests.items()}
        return f'"{{" {rests[False]} "}}"'

    def _rest(self, others: str, is_behind: bool, low: int, high: int | None) -> str:
        """Members of no fixed name. is_behind: others came before."""
        if not others or high == 0:
            return ""
        if is_behind:
            return _repeated(f"{self._comma} {others}", low, high)
        more = _repeated(f"{self._comma} {others}", max(0, low - 1), None if high is None else high - 1)
        return f"{others} {more}" if low else f"({others} {more})?"

    def _others(self, shape: ObjectShape, names: list[str], place: str) -> str:
        choices = []
        for pattern, value in shape.patterns.items():
            if is_nothing(value):
                continue
            if len(shape.patterns) > 1:
                raise UnsupportedShape("patternProperties", f"several patterns: {_BESIDE}", place)
            others = [{"pattern": translated(pattern_without(names))}] if names else []
            key_shape = text_shape([{"pattern": pattern}, *others])
            if is_nothing(key_shape):
                continue
            key = self._json(key_shape)
            written = self._written(value, pointer(place, "patternProperties", pattern))
            choices.append(f"{key} {self._colon} {written}")
        if not is_nothing(shape.additional):
            if shape.patterns:
                raise UnsupportedShape("patternProperties", f"with other names: {_BESIDE}", place)
            taken = self._rule("TAKEN", " | ".join(map(_key, names))) if names else ""
            known = self._rule("KEY", f"{_STRING} & ~{taken}" if taken else _STRING)
            written = self._written(shape.additional, pointer(place, "additionalProperties"))
            choices.append(f"{known} {self._colon} {written}")
        return self._rule("member", " | ".join(choices)) if choices else ""


def _key(name: str) -> str:
    """A name as a text of a grammar."""
    return json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)


def _repeated(text: str, low: int, high: int | None) -> str:
    if high == 0:
        return ""
    if high is None:
        return f"({text})*" if low == 0 else f"({text}){{{low},}}"
    return f"({text}){{{low},{high}}}"


def slashed(pattern: str) -> str:
    """The pattern between slashes."""
    return re.sub(r"\\.|/", lambda match: match[0] if len(match[0]) > 1 else "\\/", pattern, flags=re.DOTALL)
