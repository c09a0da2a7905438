"""What protobuf's runtime hides is refused by field; fields are counted as a parser would meet them."""

from __future__ import annotations

import random

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError, Message

from triptych.api.v1 import chat_message_pb2, generate_pb2, inference_pb2
from triptych.common.v1 import sampling_pb2, tensor_pb2
from triptych_kit.wire_check import MessageLimits, WireError, check_wire

Folder = descriptor_pb2.FileDescriptorProto
Generate = generate_pb2.GenerateRequest
MANY = MessageLimits(max_fields=1_000_000, max_numbers=1_000_000)


def refusal_of(data: bytes, message: type[Message], limits: MessageLimits = MANY) -> WireError:
    with pytest.raises(WireError) as caught:
        check_wire(data, message.DESCRIPTOR, limits)
    return caught.value


def has_more(data: bytes, limit: int) -> bool:
    try:
        check_wire(data, Folder.DESCRIPTOR, MessageLimits(limit, 1000))
    except WireError as error:
        return error.reason == "TOO_MANY_FIELDS"
    return False


def varint(number: int) -> bytes:
    if number < 0x80:
        return bytes([number])
    return bytes([number & 0x7F | 0x80]) + varint(number >> 7)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def part(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


# Wrapped by a parser, with the fields that a client sees.
BEYOND: dict[str, tuple[bytes, type, list[str]]] = {
    "a packed id": (
        part(3, part(1, varint(7) + varint(2**32 + 5))),
        Generate,
        ["token_ids.ids", "token_ids.ids[1]"],
    ),
    "an id of its own": (part(3, number(1, 2**32)), Generate, ["token_ids.ids", "token_ids.ids[0]"]),
    "an id in a repeated message": (
        part(5, part(19, number(1, 2**32 + 5))),
        Generate,
        ["sampling.logit_bias", "sampling.logit_bias[0].token_id"],
    ),
    "an enum": (part(5, number(26, 2**32 + 1)), Generate, ["sampling.output_kind"]),
    "a role": (
        part(2, b"") + part(2, number(1, 2**40 + 3)),
        chat_message_pb2.ChatRequest,
        ["messages", "messages[1].role"],
    ),
    "a negative enum": (part(5, number(26, 2**64 - 2**32 + 1)), Generate, ["sampling.output_kind"]),
    "a number of more than 64 bits": (number(7, 2**64 + 5), Generate, ["priority"]),
    "an unsigned one": (part(5, number(8, 2**64)), Generate, ["sampling.seed"]),
    "an item of a batch": (
        part(1, b"") + part(1, part(3, part(1, varint(2**33)))),
        inference_pb2.GenerateBatchRequest,
        ["requests", "requests[1].token_ids.ids[0]"],
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_number_that_a_parser_would_wrap_is_refused_by_field(name):
    data, message, fields = BEYOND[name]
    message.FromString(data)
    error = refusal_of(data, message)
    assert [field for field, _ in error.violations] == fields
    assert str(error).startswith(f"{fields[-1]} is ")
    assert error.reason == "INVALID_REQUEST"


def test_the_ends_of_every_range_are_taken():
    check_wire(part(3, part(1, varint(2**32 - 1))), Generate.DESCRIPTOR, MANY)
    # Negative numbers have ten bytes.
    check_wire(part(5, number(26, 2**64 - 1)), Generate.DESCRIPTOR, MANY)
    check_wire(number(7, 2**64 - 2**63) + part(5, number(8, 2**64 - 1)), Generate.DESCRIPTOR, MANY)
    # A number may have more bytes than it needs.
    check_wire(part(3, number(1, 5)[:-1] + b"\x85\x80\x80\x80\x80\x80\x80\x00"), Generate.DESCRIPTOR, MANY)


TWICE: dict[str, tuple[bytes, type, str, str]] = {
    "prompt and ids": (
        part(2, b"x") + part(3, part(1, b"\x05")),
        Generate,
        "input",
        "input is set twice, by prompt and by token_ids; it takes one",
    ),
    "one member twice": (part(2, b"x") * 2, Generate, "input", "input is set twice, by prompt and by prompt"),
    "apart": (
        part(2, b"x") + number(7, 1) + part(5, b"") + part(4, b""),
        Generate,
        "input",
        "input is set twice, by prompt and by embeds",
    ),
    "nested": (
        part(4, number(1, 1) + part(2, b"f")),
        chat_message_pb2.ChatRequest,
        "tool_choice.choice",
        "by mode and by name",
    ),
    "in two parts of one message": (
        part(4, number(1, 1)) + part(4, part(2, b"f")),
        chat_message_pb2.ChatRequest,
        "tool_choice",
        "tool_choice is set twice",
    ),
    "where the tensor is": (
        part(3, b"") + part(4, b""),
        tensor_pb2.Tensor,
        "payload",
        "by inline and by blob",
    ),
    "no oneof": (number(9, 5) + number(9, 6), sampling_pb2.SamplingParams, "max_tokens", "is set twice;"),
}


@pytest.mark.parametrize("name", TWICE)
def test_what_takes_one_value_and_gets_two_is_refused_by_field(name):
    data, message, field, words = TWICE[name]
    message.FromString(data)
    error = refusal_of(data, message)
    assert [found for found, _ in error.violations] == [field]
    assert words in str(error)


def test_oneofs_of_different_messages_are_apart():
    check_wire(part(1, part(2, b"x")) * 2, inference_pb2.GenerateBatchRequest.DESCRIPTOR, MANY)


def test_a_group_that_would_hide_what_follows_is_refused():
    data = b"\xa3\x1f\xa4\x1f" + part(2, b"x") * 2
    assert Generate.FromString(data).prompt == "x"
    assert refusal_of(data, Generate).violations[0][0] == "500"


def test_a_field_of_another_type_is_unknown_and_left_to_the_parser():
    data = part(7, b"\x01") * 2 + number(5, 2**40)
    assert not Generate.FromString(data).HasField("priority")
    check_wire(data, Generate.DESCRIPTOR, MANY)


def test_packed_numbers_are_counted_apart():
    limits = MessageLimits(max_fields=10, max_numbers=1000)
    data = part(3, part(1, b"\x85\x05" * 1000))
    check_wire(data, Generate.DESCRIPTOR, limits)
    error = refusal_of(part(3, part(1, b"\x85\x05" * 1001)), Generate, limits)
    assert (error.reason, error.violations[0][0]) == ("TOO_MANY_FIELDS", "token_ids.ids")
    assert "more than 1000 packed numbers" in str(error)


def test_too_many_fields_name_the_outermost_repeated_one():
    limits = MessageLimits(max_fields=100, max_numbers=1000)
    batch = part(1, part(2, b"x")) * 60
    assert refusal_of(batch, inference_pb2.GenerateBatchRequest, limits).violations[0][0] == "requests"
    words = part(5, part(21, b"w") * 120)
    assert refusal_of(words, Generate, limits).violations[0][0] == "sampling.bad_words"
    chat = part(2, part(2, part(1, b"h")) * 120)
    assert refusal_of(chat, chat_message_pb2.ChatRequest, limits).violations[0][0] == "messages"


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
        deep = part(3, deep)
    assert not has_more(part(4, deep), 1000)


def test_a_number_that_does_not_end_is_not_read_to_the_end_of_the_data():
    endless = b"\xff" * 3_000_000
    assert not has_more(endless, 10)
    assert not has_more(b"\x0a" + endless, 10)
