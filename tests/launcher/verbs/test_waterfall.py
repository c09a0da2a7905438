"""Spans as lines of text."""

from __future__ import annotations

from launcher.verbs.demo import draw
from triptych.admin.v1 import admin_pb2


def span(
    name: str, start_ms: int, end_ms: int, *, id_: str, parent: str = "", ok: bool = True
) -> admin_pb2.Span:
    return admin_pb2.Span(
        name=name,
        span_id=id_,
        parent_span_id=parent,
        service="engine",
        pid=7,
        start_unix_ns=start_ms * 1_000_000,
        end_unix_ns=end_ms * 1_000_000,
        ok=ok,
    )


def test_children_stand_below_their_parents_in_order_of_their_start() -> None:
    lines = draw(
        [
            span("decode", 40, 100, id_="c", parent="a"),
            span("queue", 10, 20, id_="b", parent="a"),
            span("request", 0, 100, id_="a", parent="the client's"),
        ]
    )
    assert [line.split()[2] for line in lines] == ["request", "queue", "decode"]
    assert lines[0].index("request") < lines[1].index("queue")
    assert lines[0].endswith("100.0 ms")


def test_bars_lie_where_the_time_was() -> None:
    whole, late = draw([span("whole", 0, 100, id_="a"), span("late", 50, 100, id_="b", parent="a")])
    assert whole.count("█") == 2 * late.count("█")
    assert late.index("█") > whole.index("█")


def test_the_shortest_span_is_still_seen_and_a_failure_is_named() -> None:
    _, short = draw([span("whole", 0, 1000, id_="a"), span("short", 1000, 1000, id_="b", ok=False)])
    assert "▏" in short
    assert short.endswith("failed")


def test_no_spans_are_no_lines() -> None:
    assert draw([]) == []
