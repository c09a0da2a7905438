"""Placeholders in a prompt become the tokens of its media, whose positions are then found."""

from __future__ import annotations

import pytest

from frontend_svc.media.errors import MediaRefused
from frontend_svc.media.prompt import Expansion, Placement, expand, placements

TILES = Expansion("(row <i>)(row <i>)\n<i>", 2, 3)


def test_each_placeholder_becomes_the_text_of_its_medium() -> None:
    written = expand("a <i> b <i>", "<i>", "<i>", [Expansion("<i>", 3), TILES])
    assert written == "a <i><i><i> b (row <i><i>)(row <i><i>)\n<i><i>"
    # The text of one medium may have the placeholder of all in it.
    assert expand("<s> and <s>", "<s>", "<t>", [Expansion("<s><t>", 2)] * 2) == "<s><t><t> and <s><t><t>"


def test_a_placeholder_without_medium_is_refused_and_the_reverse() -> None:
    for prompt, num in (("a", 1), ("<i>", 0), ("<i><i>", 1), ("<i>", 2)):
        with pytest.raises(MediaRefused, match=f"one for each of {num} media"):
            expand(prompt, "<i>", "<i>", [Expansion("<i>", 1)] * num)


def test_positions_are_from_the_first_embedding_to_the_last() -> None:
    ids = [1, 9, 9, 9, 2, 3, 9, 9, 4, 9, 9, 5, 9, 9, 6]
    assert placements(ids, 9, [Expansion("", 3), TILES]) == [
        Placement(1, 3),
        Placement(6, 8, bytes([1, 1, 0, 1, 1, 0, 1, 1])),
    ]
    # Media without text between them.
    assert placements([9, 9, 9], 9, [Expansion("", 2), Expansion("", 1)]) == [
        Placement(0, 2),
        Placement(2, 1),
    ]
    assert placements([1, 2], 9, []) == []


def test_tokens_for_embeddings_that_no_medium_has_are_refused() -> None:
    with pytest.raises(MediaRefused, match="has 3 tokens for embeddings, its media have 2"):
        placements([9, 9, 1, 9], 9, [Expansion("", 2)])
