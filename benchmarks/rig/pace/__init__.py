"""A feature of engines that makes each step take a time: streams of a small model then last minutes.

An engine finds it by the entry point that `write_entry_point` writes.
"""

from __future__ import annotations

from pathlib import Path

STEP_MS, SLOW_FILE = "TRIPTYCH_BENCHMARK_STEP_MS", "TRIPTYCH_BENCHMARK_SLOW_FILE"


def write_entry_point(folder: Path, slow_file: Path, step_ms: int) -> dict[str, str]:
    """Write what an engine needs to find the feature; returns what to add to its environment.

    slow_file: steps take `step_ms` longer from when it exists.
    """
    package = folder / "pace-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: pace\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[triptych.features]\npace = {__name__}\n")
    return {"PYTHONPATH": str(folder), STEP_MS: str(step_ms), SLOW_FILE: str(slow_file)}
