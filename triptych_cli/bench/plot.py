"""Plots a run: latency distributions and activity over time. Only `draw` needs matplotlib."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from triptych_cli.bench.metrics import OK, Timeline

# Fewer would hide bursts, more would exceed the resolution of the plot.
_NUM_BINS = 100
_EXTRA = "triptych[bench]"


class PlotError(RuntimeError):
    """matplotlib is not installed."""


def check_can_plot() -> None:
    """Raise PlotError, before anything is sent, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError(f"--plot needs matplotlib, which is not installed: pip install '{_EXTRA}'")


@dataclass(frozen=True, slots=True)
class Series:
    x: list[float]
    y: list[float]


def cumulative_share(values: Sequence[float]) -> Series:
    """The cumulative distribution: for each value the share of values that do not exceed it."""
    ordered = sorted(values)
    return Series(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))])


def in_flight(timelines: Sequence[Timeline]) -> Series:
    """Requests in flight after each sending and each end, by seconds since the first sending."""
    began_at = min(each.sent_at for each in timelines)
    changes = [(each.sent_at - began_at, 1) for each in timelines]
    changes += [(each.ended_at - began_at, -1) for each in timelines if not math.isnan(each.ended_at)]
    changes.sort()
    return Series(
        [at for at, _ in changes], [float(count) for count in accumulate(step for _, step in changes)]
    )


def token_rate(timelines: Sequence[Timeline], num_bins: int = _NUM_BINS) -> Series:
    """Tokens per second in equal intervals of the run, at the middle of each, in s from the first sending."""
    began_at = min(each.sent_at for each in timelines)
    arrivals = [
        (at - began_at, count)
        for each in timelines
        for at, count in zip(each.token_times, each.token_counts, strict=True)
    ]
    length_s = max((at for at, _ in arrivals), default=0.0)
    if length_s == 0.0:
        return Series([], [])
    counts = [0] * num_bins
    for at, count in arrivals:
        counts[min(num_bins - 1, int(at / length_s * num_bins))] += count
    width_s = length_s / num_bins
    return Series(
        [(index + 0.5) * width_s for index in range(num_bins)], [count / width_s for count in counts]
    )


def draw(timelines: Sequence[Timeline], title: str, path: Path) -> None:
    """Write the plot as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    done = [each for each in timelines if each.code == OK]
    latencies = {
        "time to first token, ms": [each.ttft_ms for each in done if each.ttft_ms is not None],
        "time per output token, ms": [each.tpot_ms for each in done if each.tpot_ms is not None],
        "inter-token latency, ms": [gap for each in done for gap in each.itls_ms],
        "end-to-end latency, ms": [each.e2e_ms for each in done],
    }
    figure, panels = pyplot.subplots(2, 3, figsize=(15, 8))
    places = (panels[0][0], panels[0][1], panels[1][0], panels[1][1])
    for panel, (name, values) in zip(places, latencies.items(), strict=True):
        if values:
            line = cumulative_share(values)
            panel.step(line.x, line.y, where="post")
        panel.set(xlabel=name, ylabel="share of values", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    if timelines:
        flight, rate = in_flight(timelines), token_rate(timelines)
        panels[0][2].step(flight.x, flight.y, where="post")
        panels[1][2].plot(rate.x, rate.y)
    panels[0][2].set(xlabel="time, s", ylabel="requests in flight")
    panels[1][2].set(xlabel="time, s", ylabel="output tokens a second")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
