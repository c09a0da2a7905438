"""The boundary as a picture: CPU of each side and time to the first output, by requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Row

_PANELS = (
    ("engine_us", "engine, us of CPU a step"),
    ("stream_us", "frontend, us of CPU a step, rows left out"),
    ("first_p50_us", "ADD to first output, p50 in us"),
)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write the picture. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(_PANELS), figsize=(18, 5), layout="constrained")
    for panel, (column, title) in zip(panels, _PANELS, strict=True):
        for name in dict.fromkeys(str(row["arrangement"]) for row in rows):
            own = [row for row in rows if row["arrangement"] == name]
            panel.plot(
                [str(row["requests"]) for row in own],
                [float(str(row[column])) for row in own],
                marker="o",
                linestyle="--" if name.startswith("zmq") else "-",
                label=name,
            )
        panel.set(title=title, xlabel="requests in flight", ylim=(0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)
