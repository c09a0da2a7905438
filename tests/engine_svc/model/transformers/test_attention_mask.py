"""Windows are read off masks exactly, and a mask that is neither causal nor a window is noticed."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from engine_svc.model.transformers.attention_mask import MaskBook, OddMask

LENGTH = 8


def window_of(function, **options: object) -> int | None:
    book = MaskBook()
    # A layer gets the one mask out of several, or a slice of it.
    book.make_mask(q_length=LENGTH, kv_length=LENGTH, mask_function=causal_mask_function)
    mask = book.make_mask(q_length=LENGTH, kv_length=LENGTH, mask_function=function, **options)
    book.make_mask(q_length=LENGTH, kv_length=LENGTH, mask_function=sliding_window_causal_mask_function(2))
    return book.window_of(mask[:, :, :, :LENGTH])


def test_a_causal_mask_has_no_window():
    assert window_of(causal_mask_function) is None


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 4096, 131_072])
def test_a_window_is_found_however_much_longer_than_the_sample(window):
    assert window_of(sliding_window_causal_mask_function(window)) == window


@pytest.mark.parametrize(
    "function",
    [
        bidirectional_mask_function,
        sliding_window_bidirectional_mask_function(4),
        chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)),
        chunked_causal_mask_function(8191, torch.zeros(1, dtype=torch.int64)),
        or_masks(causal_mask_function, lambda batch, head, query, key: key < 5),
        or_masks(sliding_window_causal_mask_function(4), lambda batch, head, query, key: key == 0),
    ],
    ids=["both ways", "window both ways", "chunks", "long chunks", "odd chunks", "prefix", "anchored window"],
)
def test_what_is_neither_causal_nor_a_window_is_refused(function):
    with pytest.raises(OddMask, match="see other tokens"):
        window_of(function)


def test_a_mask_that_was_not_asked_for_here_is_refused():
    book = MaskBook()
    book.make_mask(q_length=LENGTH, kv_length=LENGTH, mask_function=causal_mask_function)
    with pytest.raises(OddMask, match="a mask of its own"):
        book.window_of(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril())


def looked_up(function, is_image: list[bool]):
    """The function, where a table of the sample's places says more of them."""
    table = torch.tensor(is_image)
    return lambda batch, head, query, key: function(batch, head, query, key) | (table[query] & table[key])


@pytest.mark.parametrize("window", [None, 3, 4096])
def test_a_mask_that_looks_places_up_is_judged_by_the_sample_and_its_named_window(window):
    plain = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    assert window_of(looked_up(plain, [False] * LENGTH), local_size=window) == window


def test_a_mask_that_looks_up_places_that_see_each_other_is_refused():
    with pytest.raises(OddMask, match="see other tokens"):
        window_of(looked_up(causal_mask_function, [True] * LENGTH))


def test_a_mask_that_cannot_be_asked_is_refused():
    with pytest.raises(OddMask, match="cannot be asked"):
        window_of(lambda batch, head, query, key: torch.ones(3, 5) @ torch.ones(3, 5))
