"""The last traces of a process as its admin HTTP listener shows them."""

from __future__ import annotations

import json
import os

import pytest

from triptych_kit.http.admin_http import AdminHTTP, read_page
from triptych_kit.http.trace_page import traces_page
from triptych_kit.telemetry.spans import SpanEvent
from triptych_kit.telemetry.traces import begin_trace, record_trace, setup_telemetry, shutdown_telemetry


async def test_traces_are_shown_newest_first_with_times_since_their_start():
    setup_telemetry("engine", instance="3")
    older, newer = begin_trace("older"), begin_trace("newer")
    start_ns = 1_700_000_000_123_456_789
    spans = [
        newer.root(
            "newer", start_ns, start_ns + 5_000_000, {"n": ("a",)}, [SpanEvent("e", start_ns)], "broken"
        ),
        newer.child(0, "queue", start_ns + 1_000_000, start_ns + 3_000_000),
    ]
    record_trace(older, lambda: [older.root("older", 0, 1)])
    record_trace(newer, lambda: spans)
    listener = AdminHTTP("127.0.0.1:0", {"/traces/last": traces_page})
    address = await listener.start()
    shown = json.loads(await read_page(address, "/traces/last?n=2", limit_s=10))["traces"]
    newest = json.loads(await read_page(address, "/traces/last?n=1", limit_s=10))["traces"]
    await listener.stop(0)
    shutdown_telemetry()
    assert [trace["name"] for trace in shown] == ["newer", "older"]
    (first,) = newest
    assert (first["trace_id"], first["start_unix_ms"], first["duration_ms"]) == (
        f"{newer.trace_id:032x}", 1_700_000_000_123.456, 5.0,
    )  # fmt: skip
    assert (first["service"], first["instance"], first["pid"]) == ("engine", "3", os.getpid())
    root, queue = first["spans"]
    assert (root["attributes"], root["error"]) == ({"n": ["a"]}, "broken")
    assert root["events"] == [{"name": "e", "at_ms": 0.0, "attributes": {}}]
    assert (queue["start_ms"], queue["duration_ms"], queue["parent_span_id"]) == (1.0, 2.0, root["span_id"])


@pytest.mark.parametrize("n", ["0", "65", "x", "-1"])
async def test_a_number_of_traces_out_of_range_is_refused_with_the_range(n: str):
    page = await traces_page(f"/traces/last?n={n}")
    assert (page.status, page.body) == (400, f"n '{n}' is not in 1..64\n".encode())
