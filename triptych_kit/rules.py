"""Rules of fields, which the contract declares as options: compiled once per descriptor.

Knows no message by name: it reads the options of the descriptors that it is called with.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

# Values of the contract's enum Limit by name. A limit without a value is the number in the rule, or none.
Limits: TypeAlias = "Mapping[str, int]"
VOCABULARY, MODEL_LENGTH = "LIMIT_VOCABULARY", "LIMIT_MODEL_LENGTH"
MAX_N, MAX_LOGPROBS = "LIMIT_MAX_N", "LIMIT_MAX_LOGPROBS"

_OPTION = "triptych.options.v1.rules"
_MAX_SHOWN_CHARS = 60
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_U32_BYTES = 4


class Violation(NamedTuple):
    """A value that breaks a rule.

    field: the path for clients, that of the list for an entry. location: the path with the entry's index.
    """

    field: str
    location: str
    text: str

    @property
    def message(self) -> str:
        return f"{self.location} {self.text}"

    def below(self, field: str, location: str) -> Violation:
        """The same in the message at `location`. Without a field of its own, it is its container's."""
        if not self.field:
            return Violation(field, location + self.location, self.text)
        return Violation(f"{location}.{self.field}", f"{location}.{self.location}", self.text)


def rules_of(message: type[Message], name: str) -> Any:
    """The rules of a field that has some, a message of the contract."""
    descriptor: Any = message.DESCRIPTOR
    rules = declared_rules(descriptor.fields_by_name[name])
    assert rules is not None, f"{descriptor.full_name}.{name} has no rules"
    return rules


def declared_rules(field: FieldDescriptor) -> Any:
    """The rules of a field, a message of the contract; None where it has none."""
    for extension, rules in field.GetOptions().ListFields():
        if extension.full_name == _OPTION:
            return rules
    return None


def passed_on_fields(message: type[Message]) -> list[str]:
    """Names of the fields that frontends send as they are."""
    descriptor: Any = message.DESCRIPTOR
    return [
        field.name
        for field in descriptor.fields
        if (rules := declared_rules(field)) is not None and rules.passed_on
    ]


class MessageRules:
    """The rules of the fields of one type of message, and of the messages in it.

    apart: dotted names of fields that the caller checks by itself.
    """

    def __init__(self, message: type[Message], *, apart: Collection[str] = ()) -> None:
        descriptor: Any = message.DESCRIPTOR
        compiled = {field: _compiled(field, apart) for field in descriptor.fields}
        self._checks = {field.name: check for field, check in compiled.items() if check is not None}
        # Texts without a rule are left alone: to list the fields of a message decodes all that are set.
        leaves_texts = any(
            check is None and field.type in _TEXTS and not field.is_repeated
            for field, check in compiled.items()
        )
        self._by_name = None
        if leaves_texts or any(map(_is_checked_unset, compiled)):
            self._by_name = [
                (field.name, field.has_presence, _is_checked_unset(field), _where(field), check)
                for field, check in compiled.items()
                if check is not None
            ]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._checks)

    def violations(self, message: Message, limits: Limits) -> Sequence[Violation]:
        """In the order of the fields in the contract or of their numbers."""
        if self._by_name is None:
            values = {descriptor.name: value for descriptor, value in message.ListFields()}
            return self.violations_in(values, limits)
        broken: Sequence[Violation] = ()
        for name, has_presence, is_checked_unset, where, check in self._by_name:
            if (has_presence and not message.HasField(name)) or (where and not getattr(message, where)):
                continue
            value = getattr(message, name)
            if (value or has_presence or is_checked_unset) and (found := check(value, limits)):
                broken = [*broken, *found]
        return broken

    def violations_in(self, values: Mapping[str, Any], limits: Limits) -> Sequence[Violation]:
        """Those of the set fields of a message by name."""
        broken: Sequence[Violation] = ()
        for name, value in values.items():
            check = self._checks.get(name)
            if check is None or ((span := check.span) is not None and span[0] <= value <= span[1]):
                continue
            if found := check(value, limits):
                broken = [*broken, *found]
        return broken


# The text of a violation by one value; None for a value that keeps the rules.
_ValueCheck: TypeAlias = "Callable[[Any, Limits], str | None]"
_CountCheck: TypeAlias = "Callable[[int, Limits], str | None]"


class _Check(Protocol):
    """The rules of one field. span: the range of a number that has no other rule."""

    span: tuple[float, float] | None

    def __call__(self, value: Any, limits: Limits) -> Sequence[Violation]: ...


def _where(field: FieldDescriptor) -> str:
    return "" if (rules := declared_rules(field)) is None else str(rules.where)


def _is_checked_unset(field: FieldDescriptor) -> bool:
    rules = declared_rules(field)
    if rules is None or field.has_presence:
        return False
    is_text_required = rules.min_chars and not field.is_repeated
    return bool(rules.where or rules.min_items or rules.specified or is_text_required)


def _compiled(field: FieldDescriptor, apart: Collection[str]) -> _Check | None:
    """The check of a field; None if it has no rules or is checked apart."""
    if field.name in apart:
        return None
    checks = [] if (rules := declared_rules(field)) is None else _value_checks(field, rules)
    # Without a name, a violation is reported as the field that holds the message.
    name = "" if rules is not None and rules.in_parent_name else field.name
    nested = None
    if field.message_type is not None:
        inner = [name.partition(".")[2] for name in apart if name.startswith(f"{field.name}.")]
        nested = MessageRules(GetMessageClass(field.message_type), apart=inner) or None
    if field.is_repeated:
        count = None if rules is None else _count_check(rules)
        totals = [] if rules is None else [_total_check(field, total) for total in rules.totals]
        ids = _ids_check if rules is not None and rules.in_vocabulary else None
        if count is None and ids is None and not totals and not checks and nested is None:
            return None
        return _ListCheck(name, count, ids, checks, totals, nested)
    if nested is not None:
        return _MessageCheck(field.name, nested)
    span = _span(rules) if len(checks) == 1 else None
    return _ScalarCheck(name, checks, span) if checks else None


class _ScalarCheck:
    """Of a number, text or bytes."""

    __slots__ = ("_checks", "_name", "span")

    def __init__(self, name: str, checks: Sequence[_ValueCheck], span: tuple[float, float] | None) -> None:
        self._name = name
        self.span = span
        self._checks = checks

    def __call__(self, value: Any, limits: Limits) -> Sequence[Violation]:
        for check in self._checks:
            if (text := check(value, limits)) is not None:
                return (Violation(self._name, self._name, text),)
        return ()


class _MessageCheck:
    __slots__ = ("_name", "_rules", "span")

    def __init__(self, name: str, rules: MessageRules) -> None:
        self._name = name
        self._rules = rules
        self.span: tuple[float, float] | None = None

    def __call__(self, value: Any, limits: Limits) -> Sequence[Violation]:
        broken = self._rules.violations(value, limits)
        return [violation.below(self._name, self._name) for violation in broken] if broken else ()


class _ListCheck:
    """Of a list. Where it has too many entries or too few, none is looked at.

    Texts in entries are not counted where inner lists have too many entries together. Where a total is too
    large, no message of the list is looked at.
    """

    __slots__ = ("_checks", "_count", "_ids", "_name", "_nested", "_totals", "span")

    def __init__(
        self,
        name: str,
        count: _CountCheck | None,
        ids: Callable[[Sequence[int], Limits], tuple[int, str] | None] | None,
        checks: Sequence[_ValueCheck],
        totals: Sequence[_TotalCheck],
        nested: MessageRules | None,
    ) -> None:
        self._name = name
        self.span: tuple[float, float] | None = None
        self._count = count
        self._ids = ids
        self._checks = checks
        # Those of inner lists, then those of texts.
        self._totals = [
            [total.check for total in totals if total.is_of_texts is of_texts] for of_texts in (False, True)
        ]
        self._nested = nested

    def __call__(self, value: Any, limits: Limits) -> Sequence[Violation]:
        name = self._name
        if self._count is not None and (text := self._count(len(value), limits)) is not None:
            return (Violation(name, name, text),)
        if self._ids is not None and (outside := self._ids(value, limits)) is not None:
            return (Violation(name, f"{name}[{outside[0]}]", outside[1]),)
        totals = self._violated_totals(value) if value else ()
        if totals and self._nested is not None:
            return totals
        broken: list[Violation] = []
        if self._checks:
            for index, entry in enumerate(value):
                texts = (check(entry, limits) for check in self._checks)
                text = next((text for text in texts if text is not None), None)
                if text is not None:
                    broken.append(Violation(name, f"{name}[{index}]", text))
        broken += totals
        if self._nested is not None:
            for index, entry in enumerate(value):
                inner = self._nested.violations(entry, limits)
                broken += [violation.below(name, f"{name}[{index}]") for violation in inner]
        return broken

    def _violated_totals(self, value: Any) -> Sequence[Violation]:
        for totals in self._totals:
            texts = [text for total in totals if (text := total(value)) is not None]
            if texts:
                return [Violation(self._name, self._name, text) for text in texts]
        return ()


def _value_checks(field: FieldDescriptor, rules: Any) -> list[_ValueCheck]:
    """The checks of the field's value, or of each entry of a list."""
    checks: list[_ValueCheck] = []
    if rules.column:
        checks += _column_checks(rules)
    elif rules.in_vocabulary and not field.is_repeated:
        checks.append(_id_check)
    if rules.maximum_limit:
        checks.append(_limited_check(rules))
    elif (span := _span(rules)) is not None:
        checks.append(_range_check(rules, span))
    if rules.defined and field.enum_type is not None:
        checks.append(_enum_check(field.enum_type, is_specified=rules.specified))
    if rules.min_chars or rules.HasField("max_chars"):
        checks.append(
            _length_check(rules.min_chars, rules.max_chars if rules.HasField("max_chars") else None)
        )
    if rules.HasField("max_bytes"):
        checks.append(_size_check(rules.max_bytes))
    if rules.printable:
        checks.append(_printable_check)
    if rules.no_nul:
        checks.append(_nul_check)
    return checks


def _span(rules: Any) -> tuple[float, float] | None:
    """The least and the most of a range in the contract; None where it has none."""
    has_range = rules.finite or rules.HasField("minimum") or rules.HasField("maximum")
    if not has_range or rules.maximum_limit:
        return None
    least = rules.minimum if rules.HasField("minimum") else -math.inf
    most = rules.maximum if rules.HasField("maximum") else math.inf
    if rules.above_minimum:
        least = math.nextafter(least, math.inf)
    if rules.finite:
        least, most = max(least, -sys.float_info.max), min(most, sys.float_info.max)
    return least, most


def _range_check(rules: Any, span: tuple[float, float]) -> _ValueCheck:
    (least, most), words = span, range_words(rules)
    also = rules.also if rules.HasField("also") else None

    def check(value: float, limits: Limits) -> str | None:
        if least <= value <= most or value == also:
            return None
        return f"is {shown(value)}, must be {words}"

    return check


def range_words(rules: Any) -> str:
    """The range of a number in words."""
    finite = "finite and " if rules.finite else ""
    also = f"{rules.also:g} or " if rules.HasField("also") else ""
    if not rules.HasField("maximum"):
        return f"{finite}{also}at least {rules.minimum:g}"
    least, most = _number(rules.minimum), _number(rules.maximum)
    if rules.above_minimum:
        return f"{finite}{also}above {least} and at most {most}"
    return f"{finite}{also}in {least}..{most}"


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else f"{value:g}"


def _limited_check(rules: Any) -> _ValueCheck:
    """Of a number whose maximum depends on the side that checks."""
    name, least, default = _limit_name(rules, rules.maximum_limit), int(rules.minimum), int(rules.maximum)

    def check(value: int, limits: Limits) -> str | None:
        low, most, note = least, limits.get(name, default), ""
        if most == -1:
            low, most, note = -1, limits.get(VOCABULARY, sys.maxsize), " (-1: the vocabulary)"
        return None if low <= value <= most else f"is {value}, must be in {low}..{most}{note}"

    return check


def _limit_name(rules: Any, number: int) -> str:
    enum: EnumDescriptor = rules.DESCRIPTOR.fields_by_name["maximum_limit"].enum_type
    return str(enum.values_by_number[number].name)


def _enum_check(enum: EnumDescriptor, *, is_specified: bool) -> _ValueCheck:
    accepted = [value for value in enum.values if value.number or not is_specified]
    numbers = frozenset(value.number for value in accepted)
    words = ", ".join(value.name for value in accepted)

    def check(value: int, limits: Limits) -> str | None:
        return None if value in numbers else f"is {value}, must be one of {words}"

    return check


def _count_check(rules: Any) -> _CountCheck | None:
    """Of the number of entries of a list or column; None if it is not limited."""
    least, most = rules.min_items, rules.max_items if rules.HasField("max_items") else None
    name = _limit_name(rules, rules.max_items_limit) if rules.max_items_limit else ""
    if not least and most is None and not name:
        return None
    unit = rules.unit or "entries"

    def check(num: int, limits: Limits) -> str | None:
        limit = limits.get(name, most)
        return None if num >= least and (limit is None or num <= limit) else _count(num, unit, least, limit)

    return check


class _TotalCheck(NamedTuple):
    """Of all entries of a list together. is_of_texts: characters are counted, not entries of inner lists."""

    check: Callable[[Any], str | None]
    is_of_texts: bool


def _total_check(field: FieldDescriptor, total: Any) -> _TotalCheck:
    lengths = [_len_below(field.message_type, path) for path in total.paths]
    counts = [count for count, _ in lengths] or [_len_of_texts]
    most, unit = total.maximum, total.unit or "characters"

    def check(entries: Any) -> str | None:
        num = 0
        for count in counts:
            num += count(entries)
        return _count(num, unit, 0, most) if num > most else None

    return _TotalCheck(check, all(is_of_texts for _, is_of_texts in lengths))


def _len_of_texts(texts: Any) -> int:
    return sum(map(len, texts))


def _len_below(message: Any, path: str) -> tuple[Callable[[Any], int], bool]:
    """The function that sums lengths at `path` in messages, and whether they are those of texts."""
    name, _, rest = path.partition(".")
    field = message.fields_by_name[name]
    values = attrgetter(name)
    if not rest:
        return lambda entries: sum(map(len, map(values, entries))), not field.is_repeated
    inner, is_of_texts = _len_below(field.message_type, rest)
    return lambda entries: sum(map(inner, map(values, entries))), is_of_texts


def _length_check(least: int, most: int | None) -> _ValueCheck:
    def check(value: str, limits: Limits) -> str | None:
        num = len(value)
        if num >= least and (most is None or num <= most):
            return None
        if num == 0 and most is None:
            return f"is {shown(value)}, must not be empty"
        return _count(num, "characters", least, most)

    return check


def _size_check(most: int) -> _ValueCheck:
    def check(value: bytes | str, limits: Limits) -> str | None:
        num = len(value.encode() if isinstance(value, str) else value)
        return None if num <= most else _count(num, "bytes", 0, most)

    return check


def _count(num: int, unit: str, least: int, most: int | None) -> str:
    if most is None:
        return f"has {num} {unit}, must have at least {least}"
    return f"has {num} {unit}, must have {f'at most {most}' if least == 0 else f'{least}..{most}'}"


def _printable_check(value: str, limits: Limits) -> str | None:
    if value.isprintable():
        return None
    return f"is {shown(value)}, must have only characters that can be printed"


def _nul_check(value: str, limits: Limits) -> str | None:
    return f"is {shown(value)}, must not contain a NUL character" if "\0" in value else None


def _id_check(value: int, limits: Limits) -> str | None:
    size = limits.get(VOCABULARY, math.inf)
    return None if value < size else f"is {value}, must be below the vocabulary size of {size}"


def _ids_check(ids: Sequence[int], limits: Limits) -> tuple[int, str] | None:
    """The index of the first id outside the vocabulary, and the text of the violation."""
    size = limits.get(VOCABULARY, math.inf)
    if not ids or max(ids) < size:
        return None
    index = next(index for index, token_id in enumerate(ids) if token_id >= size)
    return index, f"is {ids[index]}, must be below the vocabulary size of {size}"


def _column_checks(rules: Any) -> Iterable[_ValueCheck]:
    count = _count_check(rules)

    def check_numbers(value: bytes, limits: Limits) -> str | None:
        if len(value) % _U32_BYTES:
            return f"has {len(value)} bytes, must have whole u32 numbers"
        return count(len(value) // _U32_BYTES, limits) if count is not None else None

    def check_ids(value: bytes, limits: Limits) -> str | None:
        ids = array("I", value)
        if sys.byteorder == "big":
            ids.byteswap()
        outside = _ids_check(ids, limits)
        return None if outside is None else outside[1]

    return (check_numbers, check_ids) if rules.in_vocabulary else (check_numbers,)


def shown(value: object) -> str:
    """A value in a message, of at most 60 characters."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    # A proto float has seven significant digits; more would show digits the client did not send.
    text = repr(float(f"{value:.7g}") if isinstance(value, float) else value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."
