"""Columns of a step as log probabilities with texts."""

from __future__ import annotations

import math

from frontend_svc.output.logprobs import LogprobColumns, LogprobReader
from frontend_svc.text.tokenize.token_text import TokenTexts
from tests.frontend_svc.tokenizers import byte_fallback_tokenizer, id_of

TOKENIZER = byte_fallback_tokenizer()
TEXTS = TokenTexts(TOKENIZER)
LETTER, WORD = id_of(TOKENIZER, "a"), id_of(TOKENIZER, "▁a")
FIRST, SECOND, THIRD = (id_of(TOKENIZER, f"<0x{byte:02X}>") for byte in "本".encode())


def columns(num_positions: int, top: list[list[int]] | None = None) -> LogprobColumns:
    """Minus the place as log probability, the place as rank; `top` has as many ids at each place."""
    ids = [token_id for entries in top or [] for token_id in entries]
    k = len(top[0]) if top else 0
    values = [-float(index) for index in range(num_positions)]
    return LogprobColumns(values, range(1, num_positions + 1), k, ids, [-0.5] * len(ids))


def test_a_character_of_several_tokens_is_the_text_of_the_last_in_every_column():
    reader = LogprobReader(TEXTS, [LETTER], has_top=True)
    top = [[FIRST, LETTER], [SECOND, LETTER], [THIRD, WORD]]
    read = reader.read([FIRST, SECOND, THIRD], columns(3, top))
    assert read.texts == ["", "", "本"]
    assert read.top_texts == [["", "a"], ["", "a"], ["本", " a"]]


def test_a_character_that_is_cut_by_a_step_has_its_text_all_the_same():
    reader = LogprobReader(TEXTS, [LETTER], has_top=True)
    steps = [reader.read([token_id], columns(1, [[token_id]])) for token_id in (FIRST, SECOND, THIRD)]
    assert [read.texts for read in steps] == [[""], [""], ["本"]]
    assert [read.top_texts for read in steps] == [[[""]], [[""]], [["本"]]]


def test_a_prompt_begins_where_a_text_does():
    assert LogprobReader(TEXTS, has_top=False).read([WORD, WORD], columns(2)).texts == ["a", " a"]


def test_values_are_summed_over_all_that_is_read():
    reader = LogprobReader(None, has_top=False)
    read = reader.read([LETTER, WORD, LETTER], columns(3))
    reader.read([WORD, WORD], columns(2))
    assert (reader.cumulative, read.ranks) == (-4.0, [1, 2, 3])
    assert (read.texts, read.top_texts, read.top_ids) == ([], [], [])


def test_there_is_no_sum_once_a_value_is_not_there():
    reader = LogprobReader(None, has_top=False)
    reader.read([LETTER], columns(1))
    assert math.isnan(reader.read([LETTER], LogprobColumns([math.nan], [0])).logprobs[0])
    assert reader.cumulative is None
    reader.read([LETTER, WORD, LETTER], columns(3))
    assert reader.cumulative is None


def test_what_the_neighbours_of_a_step_asked_for_changes_nothing():
    """Columns are as wide as the widest request of a step wants, and each step has others."""
    steps = [columns(1, [[WORD, LETTER]]), columns(1), columns(1, [[WORD]])]
    reader = LogprobReader(TEXTS, has_top=False)
    plain = [reader.read([LETTER], part) for part in steps]
    assert [(read.top_ids, read.top_logprobs, read.top_texts) for read in plain] == [([], [], [])] * 3
    reader = LogprobReader(TEXTS, has_top=True)
    read = reader.read([LETTER], steps[0])
    for part in steps[1:]:
        read.extend(reader.read([LETTER], part))
    # A position without logprobs, e.g. after an adoption, keeps the others where they are.
    assert [list(ids) for ids in read.top_ids] == [[WORD, LETTER], [], [WORD]]
    assert [list(ids) for ids in read.after(2).top_ids] == [[WORD]]
    assert list(map(len, read.top_texts)) == [2, 0, 1]
