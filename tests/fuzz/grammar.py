"""Draws serialized messages from descriptors: valid ones, ones at the edges of what is valid, hostile ones.

Written as bytes, as most hostile messages cannot be made with generated code. Knows no RPC.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_MAX_DEPTH = 4
_VARINT, _FIXED64, _BYTES, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_U32 = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_SINT32)
_I32 = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_ENUM)
_NARROW = (*_U32, *_I32)
_WIDE = (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SINT64)
_FLOATS = {FieldDescriptor.TYPE_FLOAT: "<f", FieldDescriptor.TYPE_DOUBLE: "<d"}
# What most fields are in honest requests; others get a small number, a short text or a part.
_VALID_TEXTS = {
    "model": "", "arguments_json": '{"a": 1}', "parameters_json_schema": '{"type": "object"}', "stop": "zq",
    "chat_template": "", "adapter": "", "job_id": "", "cache_salt": "salt", "sha256": "0" * 64,
}  # fmt: skip
_VALID_NUMBERS = {
    "max_tokens": 3, "n": 1, "role": 3, "orphan_grace_ms": 0, "min_tokens": 0, "stream_interval": 1,
    "data_parallel_rank": 0, "priority": 1, "top_k": 5, "thinking_token_budget": 2**64 - 1, "is_last_step": 0,
    "strict": 0, "logprobs": 1, "max_pattern_size": 4, "min_count": 3, "truncate_prompt_tokens": 8,
}  # fmt: skip
_EDGE_NUMBERS = (
    0, 1, 2, 64, 127, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 2**31
)  # fmt: skip
_EDGE_TEXTS = ("", " ", "é", "\u200d", "a" * 128, "a" * 129, "a" * 257, "<|im_end|>", "{}", "[", "\ufffd")
_NO_UTF8 = (b"\xff\xfe", b"\xed\xa0\x80")
_HOSTILE_TEXTS = (*_NO_UTF8, b"\x1b[31m", b"\x00", "\u2028".encode(), b"{" * 3000, b"w" * 20_000)
# How often a field is set; 0.12 where nothing is said.
_SHARES = {
    **dict.fromkeys(("requests", "request", "messages", "parts", "inputs", "queries", "documents"), 0.97),
    **dict.fromkeys(("role", "ids"), 0.97),
    **dict.fromkeys(("sampling", "max_tokens", "text", "token_ids", "query"), 0.6),
}
_MAX_MANY = 3000
_LONG_BYTES = 70_000


class Mood(Enum):
    """How a message is drawn."""

    VALID = "valid"
    EDGE = "near-valid"
    HOSTILE = "hostile"


@dataclass(slots=True)
class Drawn:
    """`hidden`: what protobuf's runtime would take in silence, in words; empty if nothing is."""

    content: bytes = b""
    hidden: set[str] = field(default_factory=set)
    is_parsed: bool = True


def draw(rng: random.Random, descriptor: Descriptor, mood: Mood) -> Drawn:
    """A message of `descriptor`."""
    drawn = Drawn()
    drawn.content = _message(rng, descriptor, mood, drawn, 0)
    if mood is Mood.HOSTILE and rng.random() < 0.1:
        drawn.content, drawn.hidden, drawn.is_parsed = _broken(rng, drawn.content), set(), False
    return drawn


def _message(rng: random.Random, descriptor: Descriptor, mood: Mood, drawn: Drawn, depth: int) -> bytes:
    chosen = [
        each
        for each in descriptor.fields
        if (each.containing_oneof is None or _is_alone(each)) and rng.random() < _share(each, depth)
    ]
    # The first members are those that are served.
    chosen += [
        oneof.fields[0 if rng.random() < 0.6 else rng.randrange(len(oneof.fields))]
        for oneof in descriptor.oneofs
        if len(oneof.fields) > 1 and (rng.random() < 0.95 or mood is Mood.VALID)
    ]
    parts = [_field(rng, each, mood, drawn, depth) for each in chosen]
    if mood is Mood.HOSTILE:
        parts += _tricks(rng, descriptor, chosen, drawn, depth)
    return b"".join(parts)


def _is_alone(each: FieldDescriptor) -> bool:
    return each.containing_oneof is not None and len(each.containing_oneof.fields) == 1


def _share(each: FieldDescriptor, depth: int) -> float:
    if depth > _MAX_DEPTH and each.type == FieldDescriptor.TYPE_MESSAGE:
        return 0.0
    return _SHARES.get(each.name, 0.12)


def _field(rng: random.Random, each: FieldDescriptor, mood: Mood, drawn: Drawn, depth: int) -> bytes:
    count = rng.choice((1, 1, 2, 3)) if each.is_repeated else 1
    if mood is Mood.HOSTILE and each.is_repeated and rng.random() < 0.03:
        count = rng.randrange(_MAX_MANY)
        one = _value(rng, each, Mood.VALID, drawn, depth)
        return one * count
    if mood is Mood.EDGE and each.is_repeated and rng.random() < 0.1:
        count = 0
    return b"".join(_value(rng, each, mood, drawn, depth) for _ in range(count))


def _value(rng: random.Random, each: FieldDescriptor, mood: Mood, drawn: Drawn, depth: int) -> bytes:
    is_odd = mood is not Mood.VALID and rng.random() < 0.25
    if each.type == FieldDescriptor.TYPE_MESSAGE:
        return part(each.number, _message(rng, each.message_type, mood, drawn, depth + 1))
    if each.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return part(each.number, _text(rng, each, mood if is_odd else Mood.VALID, drawn))
    if each.type in _FLOATS:
        value = rng.choice((0.0, 2.0, -2.0, float("nan"), float("inf"), 1e38, 1e-40)) if is_odd else 0.5
        wire_type = _FIXED32 if each.type == FieldDescriptor.TYPE_FLOAT else _FIXED64
        return varint(each.number << 3 | wire_type) + struct.pack(_FLOATS[each.type], value)
    value = _number(rng, each, mood if is_odd else Mood.VALID)
    if each.type in _NARROW and _is_wrapped(each, value):
        drawn.hidden.add(f"{each.full_name} is {value}")
    if each.is_repeated and rng.random() < 0.8:
        return part(each.number, varint(value))
    return varint(each.number << 3 | _VARINT) + varint(value)


def _is_wrapped(each: FieldDescriptor, value: int) -> bool:
    if each.type in _U32:
        return value >= 2**32
    return 2**31 <= value < 2**64 - 2**31


def _number(rng: random.Random, each: FieldDescriptor, mood: Mood) -> int:
    if mood is Mood.VALID:
        if each.enum_type is not None and each.name not in _VALID_NUMBERS:
            return rng.choice(each.enum_type.values).number
        return _VALID_NUMBERS.get(each.name, rng.randrange(1, 5))
    if mood is Mood.EDGE:
        narrow = [value for value in _EDGE_NUMBERS if not (each.type in _NARROW and _is_wrapped(each, value))]
        return rng.choice(narrow)
    return rng.choice((2**32 + rng.randrange(8), 2**40 + 3, 2**63 + 5, *_EDGE_NUMBERS))


def _text(rng: random.Random, each: FieldDescriptor, mood: Mood, drawn: Drawn) -> bytes:
    if mood is Mood.VALID:
        return _VALID_TEXTS.get(each.name, rng.choice(("the cat", "a", "mat ran"))).encode()
    if mood is Mood.EDGE:
        return rng.choice(_EDGE_TEXTS).encode()
    content = rng.choice(_HOSTILE_TEXTS)
    if each.type == FieldDescriptor.TYPE_STRING and content in _NO_UTF8:
        drawn.is_parsed = False
    return content


def _tricks(
    rng: random.Random, descriptor: Descriptor, chosen: list[FieldDescriptor], drawn: Drawn, depth: int
) -> list[bytes]:
    """Parts that no serializer writes."""
    parts: list[bytes] = []
    if rng.random() < 0.05:
        parts.append(varint(900 << 3 | _START_GROUP) + varint(900 << 3 | _END_GROUP))
    if rng.random() < 0.1:
        parts.append(part(901, b"?" * rng.choice((1, 10, _LONG_BYTES))))
    singular = [each for each in chosen if not each.is_repeated and each.type != FieldDescriptor.TYPE_MESSAGE]
    if singular and rng.random() < 0.08:
        again = rng.choice(singular)
        parts.append(_value(rng, again, Mood.VALID, drawn, depth))
        drawn.hidden.add(f"{again.full_name} twice")
    choices = [oneof for oneof in descriptor.oneofs if len(oneof.fields) > 1]
    if choices and rng.random() < 0.1:
        oneof = rng.choice(choices)
        parts += [_value(rng, rng.choice(oneof.fields), Mood.VALID, drawn, depth) for _ in range(2)]
        drawn.hidden.add(f"{oneof.full_name} twice")
    return parts


def _broken(rng: random.Random, content: bytes) -> bytes:
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: content[: rng.randrange(len(content) + 1)] + b"\xff",
        lambda: content + b"\x12\xff\xff\xff\xff\x0f",
        lambda: bytes(rng.randrange(256) for _ in range(rng.randrange(200))),
    )
    return rng.choice(changes)()


def varint(number: int) -> bytes:
    if number < 0x80:
        return bytes([number])
    return bytes([number & 0x7F | 0x80]) + varint(number >> 7)


def part(number: int, content: bytes) -> bytes:
    return varint(number << 3 | _BYTES) + varint(len(content)) + content
