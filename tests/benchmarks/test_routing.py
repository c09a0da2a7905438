"""The load that routing policies are compared under."""

from __future__ import annotations

from benchmarks.routing import LONG_TOKENS, SHORT_TOKENS, make_arrivals


def test_every_eighth_prompt_is_fifty_times_as_long_and_none_is_like_another() -> None:
    arrivals = make_arrivals(24, interval_s=0.1, seed=1)
    lengths = [len(arrival.token_ids) for arrival in arrivals]
    assert LONG_TOKENS == 50 * SHORT_TOKENS
    assert lengths == [*[SHORT_TOKENS] * 7, LONG_TOKENS] * 3
    assert len({arrival.token_ids for arrival in arrivals}) == 24


def test_two_policies_get_the_same_requests_at_the_same_instants() -> None:
    assert make_arrivals(16, interval_s=0.1, seed=3) == make_arrivals(16, interval_s=0.1, seed=3)
