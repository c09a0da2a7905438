"""Token rules: the words that may not appear, with real tokens."""

from __future__ import annotations

import pytest

from frontend_svc.options.token_rules import bad_word_sequences
from tests.frontend_svc.options.asking import BYTE_LEVEL, Encoder, completed
from tests.frontend_svc.tokenizers import byte_fallback_tokenizer, id_of, word_piece_tokenizer
from triptych.common.v1 import sampling_pb2
from triptych_kit.errors import InvalidArgument


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
