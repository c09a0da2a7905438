"""What a machine with a GPU runs from a bare checkout needs no gRPC, no telemetry and no pytest plugins."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT
from tests.architecture.test_imports import SOURCE_PATH

# What setup installs beside torch, triton, transformers and what they need, and pytest; and the stubs.
MISSING = (
    "grpc", "grpc_health", "grpc_reflection", "grpc_status", "google", "opentelemetry", "prometheus_client",
    "triptych", "psutil", "uvloop", "starlette", "uvicorn", "llguidance", "pytest_asyncio", "hypothesis",
    "grimp", "importlinter",
)  # fmt: skip

WITHOUT = """
import importlib, importlib.machinery, sys

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            return None
        return super().find_spec(name, path, target)

# An editable install has a finder of its own: without it, the checkout is all that there is of the project.
sys.meta_path[:] = [finder for finder in sys.meta_path if finder.__module__ == "_frozen_importlib"] + [Finder]
for name in {modules}:
    importlib.import_module(name)
"""


def modules_below(*folders: str) -> list[str]:
    """Every module of these folders."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]


@pytest.mark.parametrize(
    "modules",
    [
        ["tests.conftest", *modules_below("tests/gpu", "tests/kernels/triton")],
        ["benchmarks.__main__", "benchmarks.scenarios.gpu", "benchmarks.scenarios.kernels"],
        [
            "engine_svc.loop.engine",
            "engine_svc.core.step",
            "engine_svc.core.sampling_params",
            "engine_svc.core.request",
        ],
        modules_below("engine_svc/runner", "engine_svc/model", "engine_svc/scheduler", "engine_svc/cache"),
    ],
    ids=["tests", "benchmarks", "core", "runner and models"],
)
def test_it_imports_with_torch_and_transformers_alone(modules: list[str]) -> None:
    program = WITHOUT.format(missing=MISSING, modules=modules)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": SOURCE_PATH, "TRITON_INTERPRET": "1", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
