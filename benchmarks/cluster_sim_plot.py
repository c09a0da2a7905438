"""The simulated cluster as a picture: cost, times to the first token, a loss, the coordinator's absence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Row

_SAMPLE_S = 0.1


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write the picture. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(14, 9), layout="constrained")
    _publish(panels[0][0], [row for row in rows if row["part"] == "publish"])
    _route(panels[0][1], [row for row in rows if row["part"] == "route"])
    _timelines(panels[1][0], [row for row in rows if row["part"] == "loss"], "how")
    _timelines(panels[1][1], [row for row in rows if row["part"] == "outage"], "loads_from")
    panels[1][0].set(title="a tenth of the engines is lost")
    panels[1][1].set(title="the coordinator is away for 10 s")
    figure.savefig(path, dpi=120)


def _publish(panel: Any, rows: Sequence[Row]) -> None:
    for num_frontends in sorted({int(str(row["frontends"])) for row in rows}):
        own = [row for row in rows if row["frontends"] == num_frontends]
        panel.plot(
            [row["engines"] for row in own],
            [row["coordinator_cpu_ms_per_s"] for row in own],
            marker="o",
            label=f"{num_frontends} frontends",
        )
    panel.axhline(1000, color="grey", linestyle=":")
    panel.set(
        title="CPU of the coordinator, ms a second, without gRPC",
        xlabel="engines",
        xscale="log",
        yscale="log",
    )
    panel.legend()


def _route(panel: Any, rows: Sequence[Row]) -> None:
    sizes = sorted({(int(str(row["engines"])), int(str(row["frontends"]))) for row in rows})
    for policy in sorted({str(row["policy"]) for row in rows}):
        own = {(row["engines"], row["frontends"]): row for row in rows if row["policy"] == policy}
        present = [size for size in sizes if size in own]
        panel.plot(
            [f"{num_engines} x {num_frontends}" for num_engines, num_frontends in present],
            [own[size]["first_token_p99_ms"] for size in present],
            marker="o",
            label=policy,
        )
    panel.set(title="time to first token, p99 in ms", xlabel="engines x frontends", yscale="log")
    panel.legend()


def _timelines(panel: Any, rows: Sequence[Row], name: str) -> None:
    for row in rows:
        values = row["timeline"]
        assert isinstance(values, list), "a timeline is a list"
        times = [_SAMPLE_S * (place + 1) for place in range(len(values))]
        panel.plot(times, values, label=f"{row['engines']} x {row['frontends']}, {row[name]}", linewidth=0.9)
    panel.set(xlabel="virtual seconds", ylabel="busiest engine by mean", ylim=(1, None))
    if rows:
        panel.legend(fontsize="small")
