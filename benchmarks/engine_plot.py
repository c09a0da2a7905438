"""The contest as a picture: output tokens per second by concurrency, a panel a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Row


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write the picture. Needs matplotlib, which nothing else here does."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    figure, panels = pyplot.subplots(1, len(models), figsize=(5 * len(models), 4), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        part = [row for row in rows if row["model"] == model]
        for name in dict.fromkeys(str(row["contestant"]) for row in part):
            own = [row for row in part if row["contestant"] == name]
            panel.plot(
                [str(row["concurrency"]) for row in own],
                [float(str(row["output_tokens_per_s"])) for row in own],
                marker="o",
                label=name,
            )
        panel.set(title=model, xlabel="requests at once", ylabel="output tokens per second", yscale="log")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
