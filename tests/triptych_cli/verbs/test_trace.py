"""Traces as lines of text, and the verb that reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.triptych_cli.fakes import triptych
from triptych_cli.verbs.trace import draw
from triptych_kit.http.admin_http import AdminHTTP
from triptych_kit.http.pages import Page
from triptych_kit.http.trace_page import page_of
from triptych_kit.telemetry import conventions as names


def span(name: str, start_ms: float, end_ms: float, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "start_ms": start_ms,
        "duration_ms": end_ms - start_ms,
        "error": None,
        "attributes": {},
        "events": [],
    } | fields


def trace_of(root: dict[str, Any], *children: dict[str, Any]) -> dict[str, Any]:
    return {
        "trace_id": "ab" * 16,
        "name": root["name"],
        "start_unix_ms": 1_700_000_000_123.456,
        "duration_ms": root["duration_ms"],
        "service": "frontend",
        "instance": "0",
        "pid": 7,
        "spans": [root, *children],
    }


def test_children_stand_below_the_request_in_order_of_their_start() -> None:
    head, *lines = draw(
        trace_of(
            span("chat tiny", 0, 100),
            span("decode", 40, 100, attributes={names.ENGINE: "e0", names.OUTPUT_INDEX: 1}),
            span("queue", 10, 20, attributes={names.ENGINE: "e0"}),
        )
    )
    assert head.startswith("chat tiny  100.0 ms  ")
    assert head.endswith(f"frontend 0  trace {'ab' * 16}")
    assert [line.partition("█")[0].rstrip() for line in lines] == [
        "  chat tiny", "    queue e0", "    decode e0 #1",
    ]  # fmt: skip
    assert lines[0].endswith("100.0 ms")


def test_bars_lie_where_the_time_was() -> None:
    _, whole, late = draw(trace_of(span("whole", 0, 100), span("late", 50, 100)))
    assert whole.count("█") == 2 * late.count("█")
    assert late.index("█") > whole.index("█")


def test_the_shortest_span_is_still_seen_and_a_failure_is_named() -> None:
    _, failed, short = draw(trace_of(span("whole", 0, 1000, error="no engine"), span("short", 1000, 1000)))
    assert "▏" in short
    assert failed.endswith("failed: no engine")


def test_a_trace_of_no_time_and_one_that_began_elsewhere_can_be_drawn() -> None:
    assert len(draw(trace_of(span("nothing", 0, 0)))) == 2
    assert len(draw(trace_of(span("resumed", 0, 10), span("queue", -500, 5)))) == 3


def test_events_follow_with_what_is_known_of_them() -> None:
    events = [
        {"name": "scheduled", "at_ms": 1.5, "attributes": {names.ENGINE: "e0"}},
        {"name": "aborted", "at_ms": 20.0, "attributes": {names.CAUSE: "client"}},
    ]
    *_, scheduled, aborted = draw(trace_of(span("chat tiny", 0, 20, events=events)))
    assert scheduled.split() == ["1.5", "ms", "scheduled", "engine=e0"]
    assert aborted.split() == ["20.0", "ms", "aborted", "cause=client"]


def test_no_text_of_a_service_controls_the_terminal() -> None:
    hostile = "x\x1b[2J\r\n\u202e\ud800"
    events = [{"name": hostile, "at_ms": 1.0, "attributes": {hostile: hostile}}]
    root = span(hostile, 0, 1, error=hostile, events=events)
    trace = trace_of(root, span("queue", 0, 1, attributes={names.ENGINE: hostile}))
    for line in draw(trace | {"service": hostile, "instance": hostile, "trace_id": hostile}):
        assert line.isprintable()


@pytest.mark.parametrize("body", [b"{}", b"[]", b"5", b'{"traces": 5}', b"no JSON"])
async def test_another_answer_than_traces_is_one_line(body: bytes) -> None:
    async def page(target: str):
        return Page(body, "application/json")

    listener = AdminHTTP("127.0.0.1:0", {"/traces/last": page})
    shown = await triptych("trace", "last", "--url", await listener.start())
    await listener.stop(0)
    assert (shown.exit_code, shown.err.count("\n")) == (1, 1)


async def test_the_verb_draws_the_last_traces_the_newest_last() -> None:
    asked: list[str] = []

    async def page(target: str):
        asked.append(target)
        return page_of([trace_of(span("newer", 0, 1)), trace_of(span("older", 0, 1))])

    listener = AdminHTTP("127.0.0.1:0", {"/traces/last": page})
    address = await listener.start()
    drawn = await triptych("trace", "last", "--url", f"http://{address}", "-n", "2")
    as_json = await triptych("trace", "last", "--url", address, "--json")
    await listener.stop(0)
    nowhere = await triptych("trace", "last", "--url", f"http://{address}")
    wrong = await triptych("trace", "last", "--url", "engine-0")
    assert asked == ["/traces/last?n=2", "/traces/last?n=1"]
    heads = [block.splitlines()[0].split()[0] for block in drawn.out.split("\n\n")]
    assert (drawn.exit_code, heads) == (0, ["older", "newer"])
    assert [trace["name"] for trace in json.loads(as_json.out)["traces"]] == ["newer", "older"]
    assert (nowhere.exit_code, wrong.exit_code) == (1, 1)
    assert address in nowhere.err
    assert "engine-0" in wrong.err
