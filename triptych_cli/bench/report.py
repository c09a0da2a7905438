"""Reports a run as tables and as JSON. Knows no clock and no server."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from triptych_cli.bench.config import BenchServeConfig
from triptych_cli.bench.metrics import Summary, Timeline
from triptych_kit.telemetry.loop_lag import LagSummary
from triptych_kit.version import installed_version

# Above the resolution of a loop's timers, and close to the time of a first token.
MAX_LATENESS_MS = 10.0
_LATENCIES = {
    "TTFT, time to first token": "ttft_ms",
    "TPOT, time per output token after the first": "tpot_ms",
    "ITL, inter-token latency": "itl_ms",
    "E2E, end-to-end latency": "e2e_ms",
}
_LEGEND = (
    "sent late: after its time of the schedule; loop late: the generator itself was busy. "
    f"Above {MAX_LATENESS_MS:g} ms, measure elsewhere."
)


@dataclass(frozen=True, slots=True)
class Result:
    """A run, whole or interrupted."""

    config: BenchServeConfig
    model: str
    summary: Summary
    timelines: Sequence[Timeline]
    num_unsent: int
    client_lag: LagSummary
    was_interrupted: bool = False


def warnings_of(result: Result) -> list[str]:
    """Warnings that the results may be limited by the load generator instead of the server."""
    lateness, lag = result.summary.lateness_ms, result.client_lag
    lines = []
    # At an infinite rate all requests are due at once, so late sending is expected.
    if lateness is not None and math.isfinite(result.config.rate) and lateness.p99 > MAX_LATENESS_MS:
        lines.append(
            f"requests were sent late: p99 {lateness.p99:.1f} ms, more than {MAX_LATENESS_MS:g} ms;"
            " the load was not what was asked for: use a quieter machine or several generators"
        )
    if lag.p99_ms > MAX_LATENESS_MS:
        lines.append(
            f"the load generator itself was busy: its loop ran p99 {lag.p99_ms:.1f} ms late, more than"
            f" {MAX_LATENESS_MS:g} ms; latencies include that"
        )
    return lines


def print_result(result: Result, console: Console) -> None:
    """Print the tables and then the warnings."""
    if result.was_interrupted:
        done = f"{result.summary.num_completed} of {result.config.num_requests}"
        console.print(f"interrupted: {done} requests were completed", markup=False, highlight=False)
    console.print(_counts(result))
    console.print(_latencies(result.summary))
    for code, count in result.summary.failures.items():
        example = next(each.message for each in result.timelines if each.code == code)
        console.print(f"failed with {code}: {count}, e.g. {example}", markup=False, highlight=False)
    for warning in warnings_of(result):
        console.print(f"warning: {warning}", markup=False, highlight=False)


def write_json(result: Result, path: Path) -> None:
    """Write settings, results and one record for each request that was sent."""
    record = {
        "benchmark": "serve",
        "version": installed_version(),
        "model": result.model,
        "settings": asdict(result.config),
        "was_interrupted": result.was_interrupted,
        "summary": asdict(result.summary) | {"num_unsent": result.num_unsent},
        "client_lag": asdict(result.client_lag),
        "warnings": warnings_of(result),
        "requests": _requests(result.timelines),
    }
    path.write_text(json.dumps(_finite(record), indent=2) + "\n", encoding="utf-8")


def _counts(result: Result) -> Table:
    summary, config = result.summary, result.config
    lateness = summary.lateness_ms
    table = Table(
        title=f"{result.model}: {config.dataset}, rate {config.rate:g}", caption=_LEGEND, show_header=False
    )
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    rows: list[tuple[str, str]] = [
        ("completed requests", str(summary.num_completed)),
        ("failed requests", str(summary.num_failed)),
    ]
    if summary.num_interrupted or result.num_unsent:
        rows.append(("interrupted requests", str(summary.num_interrupted)))
        rows.append(("unsent turns of failed conversations", str(result.num_unsent)))
    rows += [
        ("duration, s", f"{summary.duration_s:.2f}"),
        ("prompt tokens", str(summary.num_prompt_tokens)),
        ("cached prompt tokens", str(summary.num_cached_tokens)),
        ("output tokens", str(summary.num_output_tokens)),
        ("output tokens a message", f"{summary.tokens_per_message:.2f}"),
        ("requests a second", f"{summary.requests_per_s:.2f}"),
        ("output tokens a second", f"{summary.output_tokens_per_s:.2f}"),
        ("tokens a second, prompts too", f"{summary.total_tokens_per_s:.2f}"),
    ]
    if summary.goodput_requests_per_s is not None:
        rows.append(
            (f"good requests a second, {' '.join(config.slo)}", f"{summary.goodput_requests_per_s:.2f}")
        )
    rows.append(("sent late, p99 ms", f"{lateness.p99:.2f}" if lateness else "-"))
    rows.append(("generator's loop late, p99 ms", f"{result.client_lag.p99_ms:.2f}"))
    for row in rows:
        table.add_row(*row)
    return table


def _latencies(summary: Summary) -> Table:
    table = Table(title="latencies, ms")
    table.add_column(no_wrap=True)
    for name in ("mean", "median", "p90", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    statistics = asdict(summary)
    for title, key in _LATENCIES.items():
        one = statistics[key]
        shown = (
            ("-",) * 4 if one is None else [f"{one[name]:.2f}" for name in ("mean", "median", "p90", "p99")]
        )
        table.add_row(title, *shown)
    return table


def _requests(timelines: Sequence[Timeline]) -> list[dict[str, str | int | float | None]]:
    began_at = min((each.sent_at for each in timelines), default=0.0)
    return [
        {
            "sent_s": each.sent_at - began_at,
            "lateness_ms": each.lateness_ms,
            "code": each.code or "INTERRUPTED",
            "num_prompt_tokens": each.num_prompt_tokens,
            "num_cached_tokens": each.num_cached_tokens,
            "num_output_tokens": each.num_tokens,
            "ttft_ms": each.ttft_ms,
            "tpot_ms": each.tpot_ms,
            "e2e_ms": each.e2e_ms,
        }
        for each in timelines
    ]


def _finite(value: object) -> object:
    """Replace numbers that JSON cannot represent by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
