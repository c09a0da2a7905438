"""Values that keep or break one declared rule of a message's fields, made from the rules themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from triptych_kit.rules import declared_rules

FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)


class FieldValue(NamedTuple):
    """A value of one field. path: the field's dotted name, that of the list for an entry."""

    path: str
    fields: dict[str, Any]
    keeps_rules: bool


def field_values(message: Descriptor, vocab_size: int) -> Iterator[FieldValue]:
    """The ends of each range and the nearest values beyond them, one field at a time."""
    for field in message.fields:
        rules = declared_rules(field)
        if rules is None:
            continue
        # A rule may hold only where another field is set.
        base = {rules.where: 1} if rules.where else {}
        for value, keeps_rules in _values(field, rules, vocab_size):
            yield FieldValue(field.name, {**base, field.name: value}, keeps_rules)
        if field.message_type is None:
            continue
        for inner in field_values(field.message_type, vocab_size):
            value = [inner.fields] if field.is_repeated else inner.fields
            path = field.name if field.is_repeated else f"{field.name}.{inner.path}"
            yield FieldValue(path, {field.name: value}, inner.keeps_rules)


def _values(field: FieldDescriptor, rules: Any, vocab_size: int) -> Iterator[tuple[Any, bool]]:
    one: list[tuple[Any, bool]] = [*_numbers(field, rules), *_texts(rules)]
    if rules.in_vocabulary:
        one += [(vocab_size - 1, True), (vocab_size, False)]
    if rules.defined and field.enum_type is not None:
        one += [(max(field.enum_type.values_by_number), True), (99, False)]
    if not field.is_repeated:
        yield from one
        return
    yield from (([value], keeps_rules) for value, keeps_rules in one)
    most = vocab_size if rules.max_items_limit else rules.max_items
    if most:
        entry: Any = {} if field.message_type else "x" if rules.max_chars else 0
        yield [entry] * most, True
        yield [entry] * (most + 1), False


def _numbers(field: FieldDescriptor, rules: Any) -> Iterator[tuple[float, bool]]:
    is_float = field.cpp_type in FLOATS
    kind, distance = (float, 0.01) if is_float else (int, 1)
    least = min(rules.minimum, rules.also) if rules.HasField("also") else rules.minimum
    if rules.HasField("minimum"):
        yield kind(least + distance if rules.above_minimum else least), True
        yield kind(least if rules.above_minimum else least - distance), False
    if rules.HasField("maximum"):
        yield kind(rules.maximum), True
        yield kind(rules.maximum + distance), False
    if is_float and (rules.HasField("minimum") or rules.HasField("maximum")):
        yield math.nan, False
        yield math.inf, False


def _texts(rules: Any) -> Iterator[tuple[str, bool]]:
    if rules.min_chars:
        yield "x" * rules.min_chars, True
        yield "x" * (rules.min_chars - 1), False
    if rules.max_chars:
        yield "x" * rules.max_chars, True
        yield "x" * (rules.max_chars + 1), False
    if rules.no_nul:
        yield "a\0", False
