"""Words that may not appear, with real tokens."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from frontend_svc.text.bad_words import bad_word_sequences
from service_kit.errors import InvalidArgument
from tests.frontend_svc.tokenizers import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    id_of,
    word_piece_tokenizer,
)


class Encoder:
    """Tokenizes at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


BYTE_LEVEL = byte_level_tokenizer()


async def test_a_word_is_forbidden_with_and_without_a_space_before_it():
    sequences = await bad_word_sequences(["cat"], Encoder(BYTE_LEVEL))
    assert [BYTE_LEVEL.decode(ids) for ids in sequences] == ["cat", " cat"]
    assert sequences[1] == [id_of(BYTE_LEVEL, "Ġcat")]


async def test_spaces_before_a_word_mean_neither_form():
    encoder = Encoder(BYTE_LEVEL)
    assert await bad_word_sequences(["  cat"], encoder) == await bad_word_sequences(["cat"], encoder)


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


async def test_words_without_tokens_and_with_too_many_are_all_told():
    words = ["cat", " ", "q" * 300]
    with pytest.raises(InvalidArgument) as caught:
        await bad_word_sequences(words, Encoder(BYTE_LEVEL))
    assert [description for _, description in caught.value.violations] == [
        "sampling.bad_words[1] has 0 tokens, must have 1..64",
        "sampling.bad_words[2] has 300 tokens, must have 1..64",
    ]


async def test_no_words_are_no_sequences():
    assert await bad_word_sequences([], Encoder(BYTE_LEVEL)) == []
