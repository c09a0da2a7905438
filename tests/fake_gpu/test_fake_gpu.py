"""Tests for a GPU on one that is made of CPU memory, as no machine that runs the others has a real one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 600.0
TESTS = ["tests/fake_gpu/refusals.py", "tests/fake_gpu/benchmark.py", "tests/gpu"]
# In Triton's interpreter the others take an hour.
CHOSEN = (
    "refusals or benchmark or memory or sampler or (sleeping and 2-native) or new_numbers or one_stream"
    " or without_waiting or by_number or chains or additions"
)
NUM_CHOSEN = 31


def test_what_needs_a_gpu_passes_on_one_of_cpu_memory():
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir=.", "-q"]
    run = subprocess.run(
        [*command, "--confcutdir=tests", "-p", "tests.fake_gpu.plugin", *TESTS, "-k", CHOSEN],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": ".:protos:kernels"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None and int(passed[1]) == NUM_CHOSEN, run.stdout
