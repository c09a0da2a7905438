"""The verb `trace last`: the last traces of a running service, drawn without a collector."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from triptych_cli.client_channel import client_credentials
from triptych_cli.verbs.probe import untrusted
from triptych_cli.verbs.terminal import printable
from triptych_kit.channel import TLS_SCHEMES, parse_target
from triptych_kit.errors import InvalidArgument
from triptych_kit.http.admin_http import read_page
from triptych_kit.telemetry import conventions as names

_WIDTH = 44
_BLOCK = "█"
# Shorter than one column.
_SLIVER = "▏"

Trace = Mapping[str, Any]  # as the page /traces/last has it


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options of the verb. url: of an admin HTTP listener, http://host:port."""

    url: str
    num_traces: int
    as_json: bool
    timeout_s: float


def run_trace_last(options: TraceOptions) -> int:
    """Print the last traces, the newest last. Returns 0, or 1 if they cannot be read."""
    try:
        traces = asyncio.run(read_traces(options.url, options.num_traces, timeout_s=options.timeout_s))
        drawn = ["\n".join(draw(trace)) for trace in reversed(traces)]
    except ssl.SSLCertVerificationError as error:
        print(f"triptych trace last: {untrusted(parse_target(options.url), error)}", file=sys.stderr)
        return 1
    except (InvalidArgument, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        # Of another service's JSON, a part is missing or of another type.
        cause = printable(str(error)) or f"no answer within {options.timeout_s:g} s"
        print(f"triptych trace last: {options.url}: {cause}", file=sys.stderr)
        return 1
    if options.as_json:
        print(json.dumps({"traces": traces}, indent=2))
    elif not traces:
        print("no trace yet: there is one once a request has ended")
    else:
        print("\n\n".join(drawn))
    return 0


async def read_traces(url: str, num_traces: int, *, timeout_s: float) -> list[Trace]:
    """The last traces of the service, newest first. Raises OSError or ValueError."""
    page = await read_page(
        parse_target(url),
        f"/traces/last?n={num_traces}",
        limit_s=timeout_s,
        credentials=client_credentials(),
        has_tls=url.startswith(TLS_SCHEMES),
    )
    traces: list[Trace] = json.loads(page)["traces"]
    return traces


def draw(trace: Trace) -> list[str]:
    """A line of what it is, a line for each span with a bar on a time axis, and one for each event."""
    spans: Sequence[Mapping[str, Any]] = trace["spans"]
    started_at = datetime.fromtimestamp(trace["start_unix_ms"] / 1000).astimezone()
    lines = [
        f"{trace['name']}  {trace['duration_ms']:.1f} ms  {started_at.isoformat(' ', 'milliseconds')}  "
        f"{trace['service']} {trace['instance']}  trace {trace['trace_id']}"
    ]
    root, *children = spans
    ordered = [root, *sorted(children, key=lambda span: span["start_ms"])]
    labels = [root["name"], *("  " + _label(span) for span in ordered[1:])]
    label_width = max(map(len, labels))
    # Children may end after their root by what two clocks differ.
    length_ms = max(0.001, *(span["start_ms"] + span["duration_ms"] for span in spans))
    for label, span in zip(labels, ordered, strict=True):
        left = min(_WIDTH - 1, max(0, int(span["start_ms"] * _WIDTH / length_ms)))
        bar = _BLOCK * int(span["duration_ms"] * _WIDTH / length_ms) or _SLIVER
        where = f"{' ' * left}{bar}".ljust(_WIDTH)[:_WIDTH]
        failure = "" if span["error"] is None else f"  failed: {span['error']}"
        lines.append(f"  {label:<{label_width}}  {where} {span['duration_ms']:9.1f} ms{failure}")
    lines += _events(spans)
    return [printable(line) for line in lines]


def _label(span: Mapping[str, Any]) -> str:
    attributes = span["attributes"]
    parts = [span["name"], attributes.get(names.ENGINE, "")]
    if names.OUTPUT_INDEX in attributes:
        parts.append(f"#{attributes[names.OUTPUT_INDEX]}")
    return " ".join(filter(None, parts))


def _events(spans: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for span in spans:
        for event in span["events"]:
            facts = " ".join(
                f"{name.removeprefix('triptych.')}={value}" for name, value in event["attributes"].items()
            )
            yield f"  {event['at_ms']:9.1f} ms  {event['name']}  {facts}".rstrip()
