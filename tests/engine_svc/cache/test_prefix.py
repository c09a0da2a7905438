"""The search for the longest hit over groups of several kinds, down to what all of them accept."""

from __future__ import annotations

import math

import pytest

from engine_svc.cache.attention import AttentionKind, ChunkedLocal, FullAttention, SlidingWindow
from engine_svc.cache.block_hash import BlockHasher
from engine_svc.cache.block_pool import BlockPool, content_key
from engine_svc.cache.prefix import PrefixFinder, PrefixHit
from tests.engine_svc.cache.fakes import request, tokens

FULL, WINDOW = FullAttention(2), SlidingWindow(2, 4)
NARROW, WIDE = SlidingWindow(2, 3), SlidingWindow(2, 7)
WINDOWS = NARROW, SlidingWindow(2, 5), WIDE


def _find(
    groups: tuple[AttentionKind, ...], patterns: tuple[str, ...], num_tokens: int, *, drop_last: bool = False
) -> PrefixHit:
    """Of group g the block at place p has the id 100 * g + p + 1; it is known where the pattern says T."""
    pool = BlockPool(100 * len(groups) + 1)
    pool.allocate(pool.num_usable_blocks)
    hasher = BlockHasher(math.gcd(*(kind.block_size for kind in groups)))
    known, asking = (request(name, tokens(num_tokens)) for name in "ab")
    hasher.extend(known)
    for group, (kind, pattern) in enumerate(zip(groups, patterns, strict=True)):
        num_hashes = kind.block_size // hasher.block_size
        for place in [place for place, letter in enumerate(pattern) if letter == "T"]:
            block_hash = known.block_hashes[(place + 1) * num_hashes - 1]
            pool.register([100 * group + place + 1], [content_key(block_hash, group)])
    return PrefixFinder(pool, hasher, groups, drop_last=drop_last).find(asking)


@pytest.mark.parametrize(
    ("groups", "patterns", "num_tokens", "drop_last", "expected"),
    [
        # Full attention shortens to 8 tokens, the window from there to 6.
        ((FULL, WINDOW), ("TTTTFT", "TTTFTT"), 13, False, ([1, 2, 3], [0, 102, 103])),
        # Two windows shorten each other: 12, 8, then 6.
        ((WINDOW, SlidingWindow(2, 6)), ("TTTFTT", "TTTTFF"), 13, False, ([0, 2, 3], [101, 102, 103])),
        (
            (FULL, WINDOW, WINDOW),
            ("TTTTTT", "TTTTTT", "TTTTTF"),
            13,
            False,
            ([1, 2, 3, 4, 5], [0, 0, 0, 104, 105], [0, 0, 0, 204, 205]),
        ),
        # The order of the groups is no matter.
        ((NARROW, FullAttention(4), WIDE), ("TTTT", "TT", "TTTF"), 9, False, ([0, 2], [101], [201, 202])),
        ((FULL, ChunkedLocal(2, 8), SlidingWindow(2, 5)), ("TT", "TT", "TT"), 4, False, ([1], [101], [201])),
        ((FULL, ChunkedLocal(2, 8), SlidingWindow(2, 5)), ("TT", "TT", "FT"), 5, False, ()),
        ((FULL, ChunkedLocal(2, 4)), ("TFT", "FFT"), 6, False, ()),
        ((FULL, ChunkedLocal(2, 4)), ("TTT", "FFT"), 7, False, ([1, 2, 3], [0, 0, 103])),
        ((FULL, ChunkedLocal(2, 4)), ("TTT", "FFT"), 6, False, ([1, 2], [0, 0])),
        # With a block to give up: it has to be there in all groups, may lie behind the candidate, and is
        # given up once for each candidate.
        ((WINDOW,), ("TT",), 4, True, ()),
        ((WINDOW,), ("TTT",), 7, True, ([1, 2],)),
        ((FULL, WINDOW), ("TTTT", "TTTT"), 8, True, ([1, 2, 3], [0, 102, 103])),
        ((FULL, WINDOW), ("TTTT", "TTTF"), 8, True, ([1, 2], [101, 102])),
        ((FULL, WINDOW), ("TTTF", "TTTT"), 8, True, ([1, 2], [101, 102])),
        ((NARROW, FullAttention(4), WIDE), ("TTTT", "TT", "TTTT"), 8, True, ()),
        (
            (NARROW, FullAttention(4), WIDE),
            ("FFTTFTFTTTT", "TTTTT", "FTTTTFFTTTT"),
            22,
            True,
            ([0, 0, 0, 4], [101, 102], [0, 202, 203, 204]),
        ),
        (
            (WINDOW, WIDE),
            ("TTTTTTFTTTT", "FTTTTTTTTFT"),
            22,
            True,
            ([0, 0, 0, 4, 5], [0, 0, 103, 104, 105]),
        ),
        # A run that does not fill its window is cut to whole numbers of 4 tokens before it gives up a block,
        # and after.
        ((FullAttention(4), SlidingWindow(2, 100)), ("TT", "TTTTT"), 10, True, ()),
        ((FullAttention(4), SlidingWindow(2, 100)), ("TTT", "TTTTTTT"), 14, True, ([1], [101, 102])),
        (WINDOWS, ("TFTT", "TTTT", "TTTF"), 8, True, ()),
        (WINDOWS, ("TTFTT", "TFTTT", "TTFTT"), 11, True, ([1], [101], [201])),
        (WINDOWS, ("", "", ""), 1, True, ()),
    ],
)
def test_a_hit_is_as_long_as_all_groups_accept(groups, patterns, num_tokens, drop_last, expected):
    hit = _find(groups, patterns, num_tokens, drop_last=drop_last)
    assert hit.block_ids == expected
    assert hit.num_tokens == (len(expected[0]) * groups[0].block_size if expected else 0)


def _finder(*groups: AttentionKind, drop_last: bool = False) -> PrefixFinder:
    return PrefixFinder(BlockPool(2), BlockHasher(1), groups, drop_last=drop_last)


@pytest.mark.parametrize(
    ("num_tokens", "plain", "with_one_more"),
    [
        (0, 0, 0),
        (11, 0, 0),
        (12, 12, 12),
        (13, 12, 13),
        (16, 12, 16),
        (17, 12, 16),
        (23, 12, 16),
        (24, 24, 24),
        (30, 24, 28),
    ],
)
def test_60_what_no_hit_could_cover_is_not_cacheable(num_tokens: int, plain: int, with_one_more: int):
    groups = FullAttention(4), FullAttention(6)
    assert _finder(*groups).num_cacheable_tokens(num_tokens, 4) == plain
    # The block that a hit gives up has to be there too.
    assert _finder(*groups, drop_last=True).num_cacheable_tokens(num_tokens, 4) == with_one_more
