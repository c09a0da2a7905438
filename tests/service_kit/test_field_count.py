"""Fields are counted as a parser would meet them, parts included, and no further than asked."""

from __future__ import annotations

import random

from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError

from service_kit.field_count import has_more_fields

Folder = descriptor_pb2.FileDescriptorProto


def has_more(data: bytes, limit: int) -> bool:
    return has_more_fields(data, Folder.DESCRIPTOR, limit)


def test_fields_of_parts_count_and_texts_are_one_each():
    message = Folder(name="a" * 1000, message_type=[{"name": "b", "field": [{"number": 300}, {}]}, {}])
    # name; message_type twice; of the first name and field twice; of the first of these number.
    data = message.SerializeToString()
    assert has_more(data, 6)
    assert not has_more(data, 7)


def test_empty_parts_count():
    data = Folder(message_type=[{}] * 1000).SerializeToString()
    assert (has_more(data, 999), has_more(data, 1000)) == (True, False)
    nested = Folder(message_type=[{"field": [{}] * 1000}]).SerializeToString()
    assert (has_more(nested, 1000), has_more(nested, 1001)) == (True, False)


def test_every_kind_of_number_is_one_field():
    option = descriptor_pb2.UninterpretedOption(positive_int_value=2**63, double_value=1.5)
    data = Folder(options={"uninterpreted_option": [option]}, public_dependency=[1, 2]).SerializeToString()
    assert (has_more(data, 5), has_more(data, 6)) == (True, False)


def test_unknown_fields_count_whatever_they_hold():
    # Field 500 as a text, as four bytes, and as eight.
    data = bytes([0xA2, 0x1F, 2, 0, 0, 0xA5, 0x1F, 1, 2, 3, 4, 0xA1, 0x1F, 1, 2, 3, 4, 5, 6, 7, 8])
    Folder.FromString(data)
    assert (has_more(data, 2), has_more(data, 3)) == (True, False)


def test_bytes_that_are_no_message_are_for_the_parser():
    rng = random.Random(4)
    num_broken = 0
    for _ in range(2000):
        data = bytes(rng.randrange(256) for _ in range(rng.randrange(40)))
        assert not has_more(data, 40)
        try:
            Folder.FromString(data)
        except DecodeError:
            num_broken += 1
    assert num_broken > 1000
    deep = b""
    for _ in range(300):
        # A nested type of a type of a type.
        deep = bytes([0x1A, *_varint(len(deep))]) + deep
    assert not has_more(bytes([0x22, *_varint(len(deep))]) + deep, 1000)


def _varint(number: int) -> list[int]:
    return [number] if number < 0x80 else [number & 0x7F | 0x80, *_varint(number >> 7)]


def test_a_number_that_does_not_end_is_not_read_to_the_end_of_the_data():
    endless = b"\xff" * 3_000_000
    assert not has_more_fields(endless, Folder.DESCRIPTOR, 10)
    assert not has_more_fields(b"\x0a" + endless, Folder.DESCRIPTOR, 10)
