"""Values just outside the rules that the contract declares for fields. Knows no field by name."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from triptych.options.v1 import rules_pb2
from triptych_kit.rules import VOCABULARY, Limits, declared_rules

MessageT = TypeVar("MessageT", bound=Message)

_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
_UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
# Of a bound, more than the distance of two numbers of single precision.
_STEP = 1e-6
# Longer bytes are left out: with them a message would be too large.
_MAX_BYTES = 1 << 20


def invalid_messages(message: type[MessageT], limits: Limits) -> Iterator[tuple[str, MessageT]]:
    """Messages with one value each that breaks one rule, by the dotted name of its field.

    limits: those that rules name.
    """
    descriptor: Any = message.DESCRIPTOR
    for field in descriptor.fields:
        rules = declared_rules(field) or rules_pb2.Rules()
        # A rule that holds only beside another field needs that one.
        beside = {rules.where: 1} if rules.where else {}
        for value in _invalid_values(field, rules, limits):
            yield field.name, message(**beside, **{field.name: value})
        if field.message_type is not None:
            for name, inner in invalid_messages(GetMessageClass(field.message_type), limits):
                value = [inner] if field.is_repeated else inner
                yield f"{field.name}.{name}", message(**{field.name: value})


def _invalid_values(field: FieldDescriptor, rules: Any, limits: Limits) -> Iterator[Any]:
    for value in (*_numbers(field, rules, limits), *_texts(field, rules)):
        yield [value] if field.is_repeated else value
    if rules.column:
        yield b"abc"
        yield from (struct.pack(f"<{len(ids)}I", *ids) for ids in _lists(field, rules, limits))
        if rules.in_vocabulary:
            yield struct.pack("<I", limits[VOCABULARY])
    elif field.is_repeated:
        yield from _lists(field, rules, limits)


def _numbers(field: FieldDescriptor, rules: Any, limits: Limits) -> Iterator[float]:
    is_float = field.cpp_type in _FLOATS
    if rules.HasField("minimum") and not (field.cpp_type in _UNSIGNED and rules.minimum <= 0):
        step = max(1.0, abs(rules.minimum)) * _STEP if is_float else 1
        least = rules.minimum if rules.above_minimum else rules.minimum - step
        # The value -1 of a limit is the vocabulary.
        if rules.maximum_limit or (rules.HasField("also") and least == rules.also):
            least -= step
        yield least if is_float else int(least)
    if rules.HasField("maximum"):
        step = max(1.0, abs(rules.maximum)) * _STEP if is_float else 1
        most = max(rules.maximum, limits[VOCABULARY]) if rules.maximum_limit else rules.maximum
        yield most + step if is_float else int(most + step)
    if is_float and (rules.finite or rules.HasField("minimum")):
        yield from (math.nan, -math.inf)
    if rules.finite:
        yield math.inf
    if rules.specified:
        yield 0
    if rules.defined and field.enum_type is not None:
        yield max(field.enum_type.values_by_number) + 1
    if rules.in_vocabulary and not rules.column:
        yield limits[VOCABULARY]


def _texts(field: FieldDescriptor, rules: Any) -> Iterator[str | bytes]:
    least = rules.min_chars
    if least:
        yield "x" * (least - 1)
    if rules.HasField("max_chars"):
        yield "x" * (rules.max_chars + 1)
    if rules.HasField("max_bytes") and rules.max_bytes <= _MAX_BYTES:
        yield (b"x" if field.type == field.TYPE_BYTES else "x") * (rules.max_bytes + 1)
    if rules.printable:
        yield "x" * least + "\n"
    if rules.no_nul:
        yield "x" * least + "\0"


def _lists(field: FieldDescriptor, rules: Any, limits: Limits) -> Iterator[list[Any]]:
    """Lists, or numbers of a column, that are too short, too long or too large together."""
    entry: Any = 0
    if field.message_type is not None:
        entry = GetMessageClass(field.message_type)()
    elif field.type == field.TYPE_STRING:
        entry = "x" * max(1, rules.min_chars)
    if rules.min_items:
        yield [entry] * (rules.min_items - 1)
    most = limits.get(rules_pb2.Limit.Name(rules.max_items_limit))
    if most is not None or rules.HasField("max_items"):
        yield [entry] * ((rules.max_items if most is None else most) + 1)
    for total in rules.totals:
        # Inner lists and texts of messages are left out.
        if not total.paths:
            yield ["x" * rules.max_chars] * (total.maximum // rules.max_chars + 1)
