"""Rules of fields, read from descriptors of the contract."""

from __future__ import annotations

import math
import struct

import pytest

from triptych.api.v1 import chat_message_pb2, embedding_pb2, generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.rules import MAX_LOGPROBS, MAX_N, VOCABULARY, MessageRules, rules_of

SAMPLING = MessageRules(sampling_pb2.SamplingParams)
LIMITS = {VOCABULARY: 600}


def broken(limits=LIMITS, **fields) -> list[tuple[str, str]]:
    found = SAMPLING.violations(sampling_pb2.SamplingParams(**fields), limits)
    return [(violation.field, violation.message) for violation in found]


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"temperature": math.nan}, "temperature", "temperature is nan, must be finite and in 0..2"),
        ({"top_p": 0.0}, "top_p", "top_p is 0.0, must be above 0 and at most 1"),
        ({"top_k": -2}, "top_k", "top_k is -2, must be -1 or at least 0"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, must be at least 1"),
        ({"n": 65}, "n", "n is 65, must be in 1..64"),
        ({"logprobs": 21}, "logprobs", "logprobs is 21, must be in 0..20"),
        ({"stop": ["x"] * 17}, "stop", "stop has 17 strings, must have at most 16"),
        ({"stop": ["x", ""]}, "stop", "stop[1] has 0 characters, must have 1..256"),
        (
            {"stop_token_ids": [1, 600]},
            "stop_token_ids",
            "stop_token_ids[1] is 600, must be below the vocabulary size of 600",
        ),
        (
            {"logit_bias": [{"token_id": 1}, {"token_id": 2, "bias": math.inf}]},
            "logit_bias",
            "logit_bias[1] is inf, must be in -100..100",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 4}},
            "repetition_detection.min_count",
            "repetition_detection.min_count is 0, must be in 2..64",
        ),
        (
            {"structured_output": {"choice": {}}},
            "structured_output.choice.choices",
            "structured_output.choice.choices has 0 texts, must have 1..4096",
        ),
        (
            {"structured_output": {"choice": {"choices": ["x" * 16384] * 64 + ["x"]}}},
            "structured_output.choice.choices",
            "structured_output.choice.choices has 1048577 characters, must have at most 1048576",
        ),
        (
            {"structured_output": {"regex": "a\0"}},
            "structured_output.regex",
            "structured_output.regex is 'a\\x00', must not contain a NUL character",
        ),
    ],
    ids=str,
)
def test_a_violation_names_field_value_and_rule(fields, field, message):
    assert broken(**fields) == [(field, message)]


def test_a_field_outside_the_enum_is_refused_with_its_names():
    ((field, message),) = broken(output_kind=9)
    assert field == "output_kind"
    assert message.startswith("output_kind is 9, must be one of OUTPUT_KIND_UNSPECIFIED, OUTPUT_KIND_DELTA")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 2.0, "top_p": 1e-6, "top_k": -1, "repetition_penalty": 0.001},
        {"repetition_detection": {"min_count": 1}},
        {"allowed_token_ids": range(600), "stop": ["x" * 256] * 16},
        {"thinking_token_budget": -1, "max_draft_tokens": 0, "seed": 2**64 - 1},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_the_ends_of_ranges_keep_the_rules(fields):
    assert broken(**fields) == []


def test_a_named_limit_replaces_the_number_of_the_contract():
    assert broken({MAX_N: 2}, n=3) == [("n", "n is 3, must be in 1..2")]
    assert broken({MAX_LOGPROBS: -1, VOCABULARY: 600}, logprobs=-1) == []
    open_range = "logprobs is 601, must be in -1..600 (-1: the vocabulary)"
    assert broken({MAX_LOGPROBS: -1, VOCABULARY: 600}, logprobs=601) == [("logprobs", open_range)]


def test_an_unknown_limit_is_none():
    assert broken({}, stop_token_ids=[2**32 - 1], allowed_token_ids=[7] * 1000) == []


def test_of_too_many_entries_none_is_looked_at():
    biases = [{"token_id": 600, "bias": 1000.0}] * 301
    assert broken(logit_bias=biases) == [("logit_bias", "logit_bias has 301 entries, must have at most 300")]


def test_columns_are_counted_in_numbers():
    rules = MessageRules(add_pb2.AddEntry)
    columns = [b"12345", b"", struct.pack("<2I", 3, 600), struct.pack("<I", 3)]
    entry = add_pb2.AddEntry(request_id="r", bad_words=[{"token_ids": column} for column in columns])
    found = rules.violations(entry, LIMITS)
    assert {violation.field for violation in found} == {"bad_words"}
    assert [violation.message for violation in found] == [
        "bad_words[0] has 5 bytes, must have whole u32 numbers",
        "bad_words[1] has 0 ids, must have 1..64",
        "bad_words[2] is 600, must be below the vocabulary size of 600",
    ]


def test_a_text_and_a_list_with_a_minimum_are_required():
    missing = MessageRules(add_pb2.AddEntry).violations(add_pb2.AddEntry(), LIMITS)
    assert [violation.message for violation in missing] == ["request_id has 0 characters, must have 1..256"]
    missing = MessageRules(embedding_pb2.EmbedRequest).violations(embedding_pb2.EmbedRequest(), LIMITS)
    assert [violation.message for violation in missing] == ["inputs has 0 entries, must have 1..2048"]


def test_names_of_nested_messages_are_paths():
    request = embedding_pb2.EmbedRequest(
        inputs=[{"prompt": ""}, {"token_ids": {"ids": [1, 600]}}], request_id="a\n"
    )
    found = MessageRules(embedding_pb2.EmbedRequest).violations(request, LIMITS)
    assert [(violation.field, violation.location) for violation in found] == [
        ("inputs[0].prompt", "inputs[0].prompt"),
        ("inputs[1].token_ids", "inputs[1].token_ids[1]"),
        ("request_id", "request_id"),
    ]


def test_fields_apart_are_left_to_the_caller():
    request = chat_message_pb2.ChatRequest(sampling={"n": 0, "top_k": -2})
    rules = MessageRules(chat_message_pb2.ChatRequest, apart=("messages", "sampling.n"))
    assert [violation.field for violation in rules.violations(request, LIMITS)] == ["sampling.top_k"]


def test_a_rule_is_read_by_the_name_of_its_field():
    assert rules_of(generate_pb2.GenerateRequest, "orphan_grace_ms").maximum == 5000
    assert rules_of(sampling_pb2.SamplingParams, "top_p").unset == "1, all"
