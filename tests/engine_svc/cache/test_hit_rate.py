"""The share of tokens found among what was asked for lately."""

from __future__ import annotations

import pytest

from engine_svc.cache.kv_cache import HitRate


def test_68_the_rate_is_that_of_the_last_five_requests():
    rate = HitRate(5)
    assert rate.value == 0.0
    rate.add(1, 20, 9)
    assert rate.value == 0.45
    rate.add(4, 80, 16)
    assert rate.value == 0.25
    # A sixth: the first is forgotten, 18 of 90 are left.
    rate.add(1, 10, 2)
    assert rate.value == 0.2
    rate.reset()
    assert rate.value == 0.0


def test_68_requests_counted_together_are_forgotten_together():
    rate = HitRate(5)
    rate.add(4, 100, 100)
    rate.add(1, 10, 0)
    assert rate.value == 100 / 110
    rate.add(1, 10, 5)
    assert rate.value == 5 / 20
    for _ in range(3):
        rate.add(1, 10, 0)
    assert rate.value == 5 / 50
    rate.add(1, 10, 0)
    assert rate.value == 5 / 50
    rate.add(1, 10, 0)
    assert rate.value == 0.0


def test_68_the_newest_are_never_forgotten():
    rate = HitRate(5)
    rate.add(1, 10, 10)
    rate.add(6, 100, 30)
    assert rate.value == 0.3
    rate.add(1, 50, 50)
    assert rate.value == 1.0


def test_68_several_old_ones_may_have_to_go_at_once():
    rate = HitRate(3)
    for num_hits in (10, 0, 0):
        rate.add(1, 10, num_hits)
    rate.add(2, 10, 5)
    assert rate.value == 5 / 20


def test_68_after_a_reset_it_begins_anew():
    rate = HitRate(2)
    rate.add(2, 10, 10)
    rate.reset()
    rate.add(1, 10, 0)
    rate.add(1, 10, 5)
    assert rate.value == 0.25
    rate.add(1, 10, 5)
    assert rate.value == 0.5


def test_lookups_without_tokens_are_no_lookups():
    rate = HitRate(2)
    rate.add(1, 0, 0)
    assert rate.value == 0.0
    rate.add(1, 4, 1)
    assert rate.value == 0.25


def test_the_last_thousand_count_unless_told_otherwise():
    rate = HitRate()
    rate.add(1, 1, 1)
    for _ in range(999):
        rate.add(1, 1, 0)
    assert rate.value == 0.001
    rate.add(1, 1, 0)
    assert rate.value == 0.0


def test_at_least_one_request_is_remembered():
    one = HitRate(1)
    one.add(1, 2, 1)
    one.add(1, 2, 2)
    assert one.value == 1.0
    with pytest.raises(ValueError, match="max_requests is 0, must be at least 1"):
        HitRate(0)
