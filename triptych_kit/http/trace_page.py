"""The page /traces/last?n=10 of an admin HTTP listener: the last traces of a process as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from triptych_kit.http.pages import Page
from triptych_kit.telemetry.spans import SpanRecord
from triptych_kit.telemetry.traces import MAX_RECENT, recent_traces, this_process

_DEFAULT = "10"


async def traces_page(target: str) -> Page:
    """The page of this process's recent traces, newest end first."""
    try:
        num_traces = number_of_traces(target)
    except ValueError as error:
        return Page(f"{error}\n".encode(), status=400)
    process = this_process()
    return page_of([_shown(spans, process) for spans in recent_traces(num_traces)])


def number_of_traces(target: str) -> int:
    """`n` of a target's query. Raises ValueError."""
    text = parse_qs(target.partition("?")[2]).get("n", [_DEFAULT])[-1]
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_RECENT:
        raise ValueError(f"n {text!r} is not in 1..{MAX_RECENT}")
    return int(text)


def page_of(traces: Sequence[Mapping[str, Any]]) -> Page:
    return Page(json.dumps({"traces": traces}, separators=(",", ":")).encode(), "application/json")


def _shown(spans: Sequence[SpanRecord], process: Mapping[str, str | int]) -> dict[str, Any]:
    """Times of spans are in ms since the start of the root."""
    root = spans[0]

    def since_start_ms(unix_ns: int) -> float:
        return round((unix_ns - root.start_unix_ns) / 1e6, 3)

    return {
        "trace_id": root.trace_id,
        "name": root.name,
        "start_unix_ms": root.start_unix_ns // 1000 / 1000,
        "duration_ms": round(root.duration_ms, 3),
        **process,
        "spans": [
            {
                "name": span.name,
                "span_id": span.span_id,
                "parent_span_id": span.parent_span_id,
                "start_ms": since_start_ms(span.start_unix_ns),
                "duration_ms": round(span.duration_ms, 3),
                "error": span.error,
                "attributes": dict(span.attributes),
                "events": [
                    {
                        "name": event.name,
                        "at_ms": since_start_ms(event.unix_ns),
                        "attributes": dict(event.attributes),
                    }
                    for event in span.events
                ],
            }
            for span in spans
        ],
    }
