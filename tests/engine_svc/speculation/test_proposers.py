"""What both proposers do with the tokens of a row."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from engine_svc.speculation.proposer import RowProposer
from engine_svc.speculation.text_proposers import NgramProposer, SuffixProposer
from tests.engine_svc.speculation.texts import admitted, ids, proposed

pytestmark = pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
Make = Callable[[], RowProposer]


def test_what_followed_the_same_tokens_is_proposed_up_to_the_limit(make: Make) -> None:
    text = (1, 2, 3, 4, 5, 6, 7, 8, 20, 1, 2)
    assert proposed(make(), *text, limit=1) == [3]
    assert proposed(make(), *text, limit=5) == [3, 4, 5, 6, 7]


def test_of_equal_places_the_most_recent_wins(make: Make) -> None:
    assert proposed(make(), 1, 2, 3, 20, 1, 2, 4, 30, 1, 2, limit=1) == [4]


def test_a_longer_match_wins_over_a_more_recent_one(make: Make) -> None:
    text = (1, 2, 3, 4, 50, 60, 9, 2, 3, 4, 51, 61, 8, 3, 4, 52, 62)
    assert proposed(make(), *text, 1, 2, 3, 4, limit=2) == [50, 60]


def test_a_loop_is_continued_in_full_length(make: Make) -> None:
    assert proposed(make(), 5, 1, 2, 3, 1, 2, 3, 1, limit=8) == [2, 3, 1, 2, 3, 1, 2, 3]
    assert proposed(make(), 5, 4, 4, 4, limit=6) == [4] * 6


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 50])
def test_without_repetition_nothing_is_proposed(make: Make, length: int) -> None:
    assert proposed(make(), *range(length)) == []


def test_a_row_that_grows_gets_the_same_as_one_that_is_new(make: Make) -> None:
    rng = random.Random(1)
    for _ in range(20):
        text = np.array(rng.choices(range(rng.randint(2, 8)), k=120), dtype=np.int32)
        grows = make()
        grows.add_row(3, admitted([]))
        known = 0
        while known < len(text):
            known += rng.randint(1, 6)
            draft = list(grows.propose(3, text[:known], 5))
            assert draft == proposed(make(), *text[:known].tolist(), limit=5)


def test_rows_are_independent_and_can_be_used_again(make: Make) -> None:
    proposer = make()
    proposer.add_row(0, admitted([]))
    proposer.add_row(1, admitted([]))
    assert proposer.propose(0, ids(1, 2, 3, 1, 2), 1) == [3]
    assert proposer.propose(1, ids(4, 5, 6, 1, 2), 1) == []
    proposer.remove_row(0, ids(1, 2, 3, 1, 2))
    proposer.add_row(0, admitted([]))
    assert proposer.propose(0, ids(1, 2, 7, 8, 1, 2), 1) == [7]
    assert proposer.propose(1, ids(4, 5, 6, 1, 2, 5, 6), 1) == [1]
