"""Every kernel compiles for a GPU of today, though none need be at hand."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triptych_kernels import triton as kernels

ROOT = Path(__file__).resolve().parents[3]
# Of one program, on compute capability 9.0.
MAX_SHARED_BYTES = 227 * 1024
# On 8.6, 8.9 and 12.0, which have least of it.
LEAST_SHARED_BYTES = 99 * 1024


def kernel_names() -> set[str]:
    """Every function of the package that is launched: compiled by Triton, and named a kernel."""
    found = set()
    for folder in kernels.__path__:
        for file in Path(folder).glob("*.py"):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                    found.add(node.name)
    return found


@pytest.fixture(scope="module")
def triton_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Triton finds what earlier runs compiled, by all that it was made from."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp("triton") if cache is None else cache.mkdir("triton")


def run_program(program: str, cache: Path) -> dict[str, Any]:
    """What a program of this folder, which Triton compiles for, says of each kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "protos", "kernels"))
    ended = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.triton.{program}"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return report


def test_every_kernel_compiles_and_fits_the_shared_memory_of_a_gpu(triton_cache):
    shared = run_program("compile_all", triton_cache)
    assert set(shared) == kernel_names()
    assert max(shared.values()) <= MAX_SHARED_BYTES


def test_steps_of_all_numbers_of_rows_share_one_form_of_a_kernel(triton_cache):
    forms = run_program("list_forms", triton_cache)
    assert set(forms) == {"_greedy_kernel", "_penalise_kernel", "_sample_kernel", "_paged_attention_kernel"}
    assert set(forms.values()) == {1}, forms


def test_attention_has_keys_and_values_loaded_while_it_computes_and_fits_a_small_gpu(triton_cache):
    report = run_program("attention_loads", triton_cache)
    small = {form: shared for form, (_, shared) in report.items() if form.startswith("89")}
    assert max(small.values()) <= LEAST_SHARED_BYTES, small
    # Wide heads have no room for it beside many queries.
    loads = {form: loads for form, (loads, _) in report.items() if not form.endswith("256 300")}
    assert min(loads.values()) == 2, loads
