"""Token rules: their limits, and the words that may not appear, with real tokens."""

from __future__ import annotations

import math

import pytest

from frontend_svc.options.token_rules import bad_word_sequences
from tests.frontend_svc.options.asking import BYTE_LEVEL, Encoder, breaches, completed
from tests.frontend_svc.tokenizers import byte_fallback_tokenizer, id_of, word_piece_tokenizer
from triptych.common.v1 import sampling_pb2
from triptych_kit.errors import InvalidArgument


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": range(600)},
        {"bad_words": ["x"] * 128},
        {"logit_bias": [{"token_id": i, "bias": 100.0} for i in range(300)]},
    ],
    ids=str,
)
def test_the_ends_of_each_range_are_taken(fields):
    assert breaches(**fields) == {}


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"allowed_token_ids": [2**32 - 1]}, "allowed_token_ids", "[0] is 4294967295, must be below the voc"),
        ({"allowed_token_ids": [1] * 601}, "allowed_token_ids", "has 601 ids, must have at most 600"),
        ({"bad_words": ["x"] * 129}, "bad_words", "has 129 words, must have at most 128"),
        ({"bad_words": ["x", ""]}, "bad_words", "[1] has 0 characters, must have 1..1024"),
        ({"bad_words": ["x" * 1025]}, "bad_words", "[0] has 1025 characters, must have 1..1024"),
        ({"logit_bias": [{"token_id": 1}] * 301}, "logit_bias", "has 301 entries, must have at most 300"),
        ({"logit_bias": [{"token_id": 600}]}, "logit_bias", "[0] is 600, must be below the vocabulary size"),
        (
            {"logit_bias": [{"token_id": 1, "bias": 100.5}]},
            "logit_bias",
            "[0] is 100.5, must be in -100..100",
        ),
        (
            {"logit_bias": [{"token_id": 1, "bias": math.nan}]},
            "logit_bias",
            "[0] is nan, must be in -100..100",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_violation_names_field_value_and_limit(fields, name, words):
    found = breaches(**fields)
    assert list(found) == [f"sampling.{name}"]
    assert f"sampling.{name}" in found[f"sampling.{name}"]
    assert words in found[f"sampling.{name}"]


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("allowed_token_ids", [600] * 5000, "has 5000 ids, must have at most 600"),
        ("logit_bias", [{"token_id": 600, "bias": math.nan}] * 301, "has 301 entries, must have at most 300"),
    ],
)
def test_of_too_many_entries_none_is_looked_at(name, entries, message):
    assert breaches(**{name: entries}) == {f"sampling.{name}": f"sampling.{name} {message}"}


async def test_a_word_is_forbidden_with_and_without_a_space_before_it():
    sequences = await bad_word_sequences(["cat"], Encoder(BYTE_LEVEL))
    assert [BYTE_LEVEL.decode(ids) for ids in sequences] == ["cat", " cat"]
    assert sequences[1] == [id_of(BYTE_LEVEL, "Ġcat")]


@pytest.mark.parametrize("word", ["\n", "\t", " ", "\n\n", "\nc", " cat", "  cat", "\tx ", "\u00a0x"])
async def test_white_space_at_the_beginning_of_a_word_is_taken_as_written(word):
    (only,) = await bad_word_sequences([word], Encoder(BYTE_LEVEL))
    assert BYTE_LEVEL.decode(only) == word


async def test_white_space_inside_and_behind_a_word_is_taken_as_written():
    sequences = await bad_word_sequences(["c  at \n"], Encoder(BYTE_LEVEL))
    assert [BYTE_LEVEL.decode(ids) for ids in sequences] == ["c  at \n", " c  at \n"]


async def test_a_line_break_is_forbidden_where_the_tokenizer_begins_texts_with_a_space():
    tokenizer = byte_fallback_tokenizer()
    (only,) = await bad_word_sequences(["\n"], Encoder(tokenizer))
    assert only == tokenizer.encode("a\n", add_special_tokens=False).ids[-1:]


async def test_a_form_that_another_forbids_already_is_left_out():
    # Without a token of its own for a word with a space, the space stands before the same tokens.
    tokenizer = word_piece_tokenizer()
    (only,) = await bad_word_sequences(["student"], Encoder(tokenizer))
    assert tokenizer.decode(only) == "student"


async def test_each_sequence_is_sent_once_in_the_order_of_the_words():
    sequences = await bad_word_sequences(["dog", "cat", " dog"], Encoder(BYTE_LEVEL))
    assert [BYTE_LEVEL.decode(ids) for ids in sequences] == ["dog", " dog", "cat", " cat"]


async def test_a_word_of_rare_characters_is_a_sequence_of_bytes():
    tokenizer = byte_fallback_tokenizer()
    sequences = await bad_word_sequences(["本"], Encoder(tokenizer))
    assert [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "本".encode()] == sequences[0][-3:]


async def test_words_without_tokens_and_with_too_many_are_all_reported():
    words = ["student", " ", "student " * 70, "\n"]
    with pytest.raises(InvalidArgument) as caught:
        await bad_word_sequences(words, Encoder(word_piece_tokenizer()))
    assert [description for _, description in caught.value.violations] == [
        "sampling.bad_words[1] has 0 tokens, must have 1..64",
        "sampling.bad_words[2] has 70 tokens, must have 1..64",
        "sampling.bad_words[3] has 0 tokens, must have 1..64",
    ]


async def test_no_words_are_no_sequences():
    assert await bad_word_sequences([], Encoder(BYTE_LEVEL)) == []


async def test_rules_are_sent_only_where_asked_for_and_allowed_ids_once_each_in_their_order():
    plain = await completed()
    assert (list(plain.logit_bias), list(plain.allowed_token_ids)) == ([], [])
    bias = sampling_pb2.LogitBias(token_id=3, bias=-100.0)
    asked = await completed(logit_bias=[bias], allowed_token_ids=[5, 3, 5])
    assert (list(asked.logit_bias), list(asked.allowed_token_ids)) == ([bias], [5, 3])
