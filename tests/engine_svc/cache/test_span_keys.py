"""Which keys a block has of the spans that reach into it, and where each begins."""

from __future__ import annotations

import pytest

from engine_svc.cache.block_hash import span_keys
from engine_svc.core.request import ContentSpan

TWO_SPANS = (ContentSpan(11, 10, "aaa"), ContentSpan(30, 10, "bbb"))


@pytest.mark.parametrize(
    ("start", "keys"),
    [(0, [("aaa", 11)]), (16, [("aaa", -5), ("bbb", 14)]), (32, [("bbb", -2)]), (48, [])],
)
def test_49_a_block_has_the_keys_of_its_spans_with_their_beginnings(start: int, keys: list[tuple[str, int]]):
    assert span_keys(TWO_SPANS, start, start + 16) == keys


@pytest.mark.parametrize(
    ("start", "num_tokens", "reaches"),
    [
        (15, 1, False),
        (15, 2, True),
        (16, 1, True),
        (31, 1, True),
        (32, 1, False),
        (0, 16, False),
        (0, 17, True),
    ],
)
def test_a_span_belongs_to_a_block_from_its_first_token_in_it_to_its_last(
    start: int, num_tokens: int, reaches: bool
):
    expected = [("key", start - 16)] if reaches else []
    assert span_keys([ContentSpan(start, num_tokens, "key")], 16, 32) == expected
