"""Draw the report of a scenario: python -m benchmarks.plot FILE.json PICTURE.png. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Row


@dataclass(frozen=True, slots=True)
class Panels:
    """How a report is drawn: a line for each `line`, a panel for each quantity of each `panel`."""

    x: str
    line: str
    quantities: dict[str, str]  # column: label of its axis
    panel: str | None = None
    is_logarithmic: bool = False


PANELS = {
    "engine": Panels(
        "concurrency",
        "contestant",
        {"output_tokens_per_s": "output tokens per second"},
        panel="model",
        is_logarithmic=True,
    ),
    "boundary": Panels(
        "requests",
        "arrangement",
        {
            "engine_us": "engine, us of CPU a step",
            "stream_us": "frontend, us of CPU a step, rows left out",
            "first_p50_us": "ADD to first output, p50 in us",
        },
    ),
    "scheduler": Panels(
        "running", "overlapped", {"per_decode_us": "us a decode", "p99_us": "p99 of a step, us"}
    ),
    "agents": Panels(
        "times",
        "contestant",
        {
            "recomputed_ratio": "recomputed tokens, over fcfs",
            "mean_s_ratio": "mean completion, over fcfs",
            "p95_s_ratio": "95th percentile of completions, over fcfs",
        },
        panel="panel",
    ),
    "serve": Panels(
        "streams", "dtype", {"out_tok_s": "output tokens per second", "ttft_p50_ms": "TTFT p50, ms"}
    ),
}


def draw(rows: Sequence[Row], panels: Panels, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    parts = list(dict.fromkeys(str(row[panels.panel]) for row in rows)) if panels.panel else [""]
    cells = [(part, column) for part in parts for column in panels.quantities]
    figure, axes = pyplot.subplots(
        1, len(cells), figsize=(5 * len(cells), 4), squeeze=False, layout="constrained"
    )
    for axis, (part, column) in zip(axes[0], cells, strict=True):
        shown = [row for row in rows if panels.panel is None or str(row[panels.panel]) == part]
        for name in dict.fromkeys(str(row[panels.line]) for row in shown):
            own = [row for row in shown if str(row[panels.line]) == name and row[column] is not None]
            axis.plot(
                [str(row[panels.x]) for row in own],
                [float(str(row[column])) for row in own],
                marker="o",
                label=name,
            )
        axis.set(title=part, xlabel=panels.x, ylabel=panels.quantities[column])
        if panels.is_logarithmic:
            axis.set_yscale("log")
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    record = json.loads(source.read_text(encoding="utf-8"))
    draw(record["rows"], PANELS[record["benchmark"]], target)


if __name__ == "__main__":
    main()
