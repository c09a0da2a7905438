"""What the measurement calls a problem, and that the bad requests are as bad as they may be."""

from __future__ import annotations

from benchmarks.bad_neighbours import Ended, Healthy, Measured, find_problems, nearly_matching_stops
from frontend_svc.text.limits import RequestLimits
from frontend_svc.text.stop_strings import StopBuffer

STATUSES = {"hangs": "INVALID_ARGUMENT"}
IDS = list(range(30))


def measured(phase: str, gap_ms: float, *, ids: list[int] = IDS, statuses: tuple[str, ...] = ()) -> Measured:
    times = [index * gap_ms / 1000 for index in range(200)]
    return Measured(phase, [Healthy(list(ids), times)], [Ended(status, 5.0) for status in statuses])


def test_a_gap_may_grow_by_the_goal_and_no_more() -> None:
    undisturbed = measured("undisturbed", 10.0)
    assert (
        find_problems([undisturbed, measured("hangs", 29.5, statuses=("INVALID_ARGUMENT",))], STATUSES) == []
    )
    [problem] = find_problems([undisturbed, measured("hangs", 31.0)], STATUSES)
    assert problem == "hangs: the p99 gap grew by 21.0 ms, the goal is 20"


def test_other_tokens_a_wrong_status_and_tokens_that_show_nothing_are_problems() -> None:
    undisturbed = measured("undisturbed", 10.0)
    [changed] = find_problems([undisturbed, measured("hangs", 10.0, ids=[*IDS[:-1], 7])], STATUSES)
    assert "other tokens" in changed
    wrong = measured("hangs", 10.0, statuses=("OK", "INVALID_ARGUMENT", "INTERNAL"))
    [ended] = find_problems([undisturbed, wrong], STATUSES)
    assert ended == "hangs: bad requests ended with INTERNAL, OK"
    [dull] = find_problems([measured("undisturbed", 10.0, ids=[5] * 30)], STATUSES)
    assert "1 distinct ids" in dull


def test_the_stop_strings_are_at_their_limits_differ_and_never_match() -> None:
    stops, limits = nearly_matching_stops("a"), RequestLimits()
    assert len(set(stops)) == limits.max_stop_strings
    assert {len(stop) for stop in stops} == {limits.max_stop_string_chars}
    assert {stop.count("a") for stop in stops} == {limits.max_stop_string_chars - 1}
    buffer = StopBuffer(stops, include=False)
    assert all(buffer.push("a", 1)[1] is None for _ in range(600))
