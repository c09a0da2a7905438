"""SuffixProposer: long matches, and finished answers."""

from __future__ import annotations

import random

import pytest

from engine_svc.speculation.text_proposers import SuffixProposer
from tests.engine_svc.speculation.texts import END, admitted, answer, ids, proposed


def test_the_match_extends_beyond_the_tokens_that_are_looked_up() -> None:
    text = (9, 8, 7, 1, 2, 3, 4, 50, 0, 8, 7, 1, 2, 3, 4, 51, 0, 7, 1, 2, 3, 4, 52)
    assert proposed(SuffixProposer(), *text, 9, 8, 7, 1, 2, 3, 4, limit=1) == [50]
    # Of two tokens in common, too.
    assert proposed(SuffixProposer(), 5, 1, 2, 50, 6, 1, 2, 51, 5, 1, 2, limit=1) == [50]


def test_finished_answers_are_seen_by_requests_with_the_same_salt_alone() -> None:
    proposer = SuffixProposer()
    answer(proposer, 10, 11, 12, 13, 14, 15, salt="a")
    answer(proposer, 10, 11, 32, 33, salt="")
    assert proposed(proposer, 40, 10, 11, salt="a") == [12, 13, 14, 15]
    assert proposed(proposer, 40, 10, 11, salt="b") == []
    assert proposed(proposer, 40, 10, 11, salt="") == []


def test_the_own_history_comes_first() -> None:
    proposer = SuffixProposer()
    answer(proposer, 10, 11, 12, 13, salt="a")
    assert proposed(proposer, 10, 11, 22, 23, 10, 11, limit=2, salt="a") == [22, 23]


def test_of_answers_the_longest_match_wins_and_then_the_last_answer() -> None:
    proposer = SuffixProposer()
    answer(proposer, 5, 10, 11, 12, 13, 50, salt="a")
    answer(proposer, 6, 10, 11, 12, 13, 60, salt="a")
    answer(proposer, 7, 10, 11, 70, salt="a")
    assert proposed(proposer, 5, 10, 11, 12, 13, salt="a") == [50]
    assert proposed(proposer, 10, 11, 12, 13, salt="a") == [60]
    assert proposed(proposer, 10, 11, salt="a") == [70]


def test_an_answer_is_the_output_up_to_its_end_token() -> None:
    proposer = SuffixProposer()
    proposer.add_row(7, admitted([1, 2, 3], "a"))
    proposer.remove_row(7, ids(1, 2, 3, 10, 11, END, 12, 13, END, 14))
    assert proposed(proposer, 10, 11, salt="a") == [END]
    assert proposed(proposer, 2, 3, salt="a") == []
    assert proposed(proposer, 12, 13, salt="a") == []


@pytest.mark.parametrize("num_salts", [1, 3, 1000])
def test_answers_take_a_limited_number_of_tokens(num_salts: int) -> None:
    proposer = SuffixProposer(half_tokens=100, max_tokens=1000)
    rng = random.Random(1)
    for number in range(2000):
        answer(proposer, *rng.choices(range(50), k=rng.choice((0, 7, 30, 300))), salt=str(number % num_salts))
        assert proposer.num_kept <= 1000 + 301
    newest = [201, 202, 203, 204]
    answer(proposer, *newest, salt="0")
    assert proposed(proposer, 201, 202, salt="0") == [203, 204]
    assert num_salts > 10 or proposer.num_kept <= 3 * (200 + 2)
