"""The results of a GPU as a page to read. Knows no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.report import Row, Value

_TITLES = {
    "decode": "Decode steps, over the time their memory traffic or products take at least",
    "prefill": "Prompts, over the time their products take at least",
    "kernels": "Kernels, beside their references and torch's own",
}


def write_markdown(
    path: Path, commit: str, settings: Mapping[str, Value], parts: Mapping[str, Sequence[Row]]
) -> None:
    """Write one table of settings and one for each part that has rows."""
    lines = ["# On a GPU", "", "Made by `make bench-gpu`, commit " + commit + ".", ""]
    lines += _table([{"setting": name, "value": value} for name, value in settings.items()])
    for part, rows in parts.items():
        if rows:
            lines += ["", f"## {_TITLES[part]}", "", *_table(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(rows: Sequence[Row]) -> list[str]:
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_shown(row[column]) for column in columns) + " |" for row in rows]
    return lines


def _shown(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else str(value)
