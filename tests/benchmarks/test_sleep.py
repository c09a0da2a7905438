"""The benchmark of sleep, in a process of its own: memory goes and comes, and the tokens are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint import CheckpointShape, make_checkpoint

_ROOT = Path(__file__).parents[2]
_SHAPE = CheckpointShape(
    hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=8, intermediate_size=2_048, vocabulary_size=8_192
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, _SHAPE, dtype=torch.bfloat16, seed=1)
    report = folder / "out.json"
    paths = os.pathsep.join(str(_ROOT / part) for part in (".", "protos", "kernels"))
    words = ("--model", str(folder), "--json", str(report), "--prompts", "6", "--prompt-tokens", "256")
    subprocess.run(
        (sys.executable, "-m", "benchmarks.sleep", *words),
        env={**os.environ, "PYTHONPATH": paths},
        cwd=_ROOT,
        check=True,
        capture_output=True,
        timeout=240,
    )
    found = json.loads(report.read_text())["rows"]
    assert [row["state"] for row in found if row["same_tokens"] is not None] == ["used again"] * 2
    assert all(row["same_tokens"] in (None, True) for row in found)
    states: dict[str, dict[str, int]] = {}
    for row in found:
        # Of states that come twice, the first is after level 1.
        states.setdefault(row["state"], row)
    states["weights awake after level 2"] = [row for row in found if row["state"] == "weights awake"][1]
    return states


def resident(rows: dict[str, dict[str, int]], state: str) -> int:
    return rows[state]["resident_mib"]


def test_level_1_gives_the_kv_cache_back_and_keeps_the_weights(rows):
    given_back = resident(rows, "used") - resident(rows, "asleep at level 1")
    assert given_back > 0.8 * rows["used"]["kv_mib"] > 8


def test_level_2_gives_the_weights_back_as_well(rows):
    given_back = resident(rows, "weights awake after level 2") - resident(rows, "asleep at level 2")
    assert given_back > 0.8 * rows["used"]["weights_mib"] > 30
    below_level_1 = resident(rows, "asleep at level 1") - resident(rows, "asleep at level 2")
    assert below_level_1 > 0.8 * rows["used"]["weights_mib"]
