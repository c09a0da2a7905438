"""The texts of single tokens, over every kind of tokenizer there is."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer

from frontend_svc.output.logprobs import LogprobColumns, LogprobReader
from frontend_svc.text.tokenize.token_text import TokenTexts
from tests.frontend_svc.tokenizers import (
    EOS,
    SAMPLES,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    id_of,
    unigram_tokenizer,
    word_piece_tokenizer,
)

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": byte_level_tokenizer,
    "BPE with byte fallback": byte_fallback_tokenizer,
    "Unigram": unigram_tokenizer,
    "WordPiece": word_piece_tokenizer,
}


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


def random_text(rng: random.Random) -> str:
    alphabet = "".join(SAMPLES) + "abc 日é😀ﷺ🇯🇵\u0301"
    words = ["".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 12))]
    return " ".join(words)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def texts_in_turn(texts: TokenTexts, context: Sequence[int], ids: Sequence[int]) -> list[str]:
    """What consecutive tokens add, as the log probabilities of an output behind `context` show them."""
    columns = LogprobColumns(array("f", [-1.0] * len(ids)), array("I", [1] * len(ids)))
    return LogprobReader(texts, context, has_top=False).read(ids, columns).texts


def test_the_texts_of_a_sequence_are_its_decoded_text(tokenizer):
    rng, texts = random.Random(5), TokenTexts(tokenizer)
    num_tokens = 0
    for _ in range(250):
        ids = ids_of(tokenizer, random_text(rng))
        pieces = texts_in_turn(texts, [], ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
        num_tokens += len(ids)
    assert num_tokens > 2000


def test_a_sequence_cut_anywhere_has_the_same_texts(tokenizer):
    rng, texts = random.Random(6), TokenTexts(tokenizer)
    for _ in range(60):
        ids = ids_of(tokenizer, random_text(rng))
        cut = rng.randint(1, len(ids))
        whole = texts_in_turn(texts, [], ids)
        assert texts_in_turn(texts, ids[:cut], ids[cut:]) == whole[cut:]


def test_no_text_shows_half_a_character(tokenizer):
    rng, texts = random.Random(7), TokenTexts(tokenizer)
    vocabulary = range(tokenizer.get_vocab_size())
    for _ in range(300):
        context = rng.choices(vocabulary, k=rng.randint(0, 5))
        for text in texts.added_each(context, rng.choices(vocabulary, k=20)):
            assert not text.endswith("\ufffd")


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_a_token_that_only_begins_a_character_has_no_text_and_the_one_that_ends_it_has_all(make):
    tokenizer = make()
    ids = ids_of(tokenizer, "aﷺ")[-3:]
    assert tokenizer.decode(ids) == "ﷺ"
    context = ids_of(tokenizer, "a")
    assert texts_in_turn(TokenTexts(tokenizer), context, ids) == ["", "", "ﷺ"]


def test_two_characters_of_bytes_in_a_row_are_told_apart():
    tokenizer = byte_fallback_tokenizer()
    ids = ids_of(tokenizer, "aﷺ😀")[-7:]
    assert texts_in_turn(TokenTexts(tokenizer), [], ids) == ["", "", "ﷺ", "", "", "", "😀"]


def test_alternatives_complete_the_character_that_the_tokens_before_them_began():
    tokenizer = byte_fallback_tokenizer()
    first, second, third = (id_of(tokenizer, f"<0x{byte:02X}>") for byte in "本".encode())
    other, letter = id_of(tokenizer, "<0xA4>"), id_of(tokenizer, "a")
    texts = TokenTexts(tokenizer).added_each([letter, first, second], [third, other, letter, first])
    assert texts == ["本", bytes("本".encode()[:2] + b"\xa4").decode(), "a", ""]


def test_a_word_keeps_the_space_before_it_but_at_the_start_of_a_prompt():
    tokenizer = byte_fallback_tokenizer()
    word = id_of(tokenizer, "▁a")
    texts = TokenTexts(tokenizer)
    assert texts.added([word], word) == " a"
    assert texts_in_turn(texts, [], [word, word]) == ["a", " a"]


def test_special_tokens_are_shown_as_they_are_spelled(tokenizer):
    special = next(
        token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
    )
    spelled = tokenizer.id_to_token(special)
    assert TokenTexts(tokenizer).added([special], special).strip() == spelled


def test_the_end_of_sequence_has_its_text_although_the_output_does_not_show_it():
    tokenizer = byte_level_tokenizer()
    assert TokenTexts(tokenizer).added([id_of(tokenizer, "a")], id_of(tokenizer, EOS)) == EOS


def test_texts_beyond_the_limit_are_forgotten_and_found_again(tokenizer):
    small, large = TokenTexts(tokenizer, max_kept=4), TokenTexts(tokenizer)
    ids = list(range(tokenizer.get_vocab_size())) * 2
    assert small.added_each(ids[:1], ids) == large.added_each(ids[:1], ids)


def test_the_mark_of_broken_text_is_a_character_where_a_token_spells_it():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["\ufffd"])
    mark, letter = id_of(tokenizer, "\ufffd"), id_of(tokenizer, "a")
    assert texts_in_turn(TokenTexts(tokenizer), [letter], [mark, letter]) == ["\ufffd", "a"]


def test_nothing_adds_nothing(tokenizer):
    assert texts_in_turn(TokenTexts(tokenizer), [], []) == []
