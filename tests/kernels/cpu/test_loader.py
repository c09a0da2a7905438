"""When there are native ops, and what happens where there are none."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import triptych_kernels
from triptych_kernels import cpu
from triptych_kernels.cpu.loader import can_use_amx, find_isa

AVX2 = {"avx2", "fma", "bmi1", "bmi2"}
NEEDED = {
    "avx2": AVX2,
    "avx512": AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_bf16"},
}
CPU_INFO = Path("/proc/cpuinfo")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler on this machine")
@pytest.mark.parametrize("name", NEEDED)
def test_an_installation_with_a_compiler_has_native_ops_where_the_cpu_runs_them(name: str) -> None:
    if not CPU_INFO.exists():
        pytest.skip("this system does not tell what its CPU has")
    flags = set(CPU_INFO.read_text().split())
    found = find_isa(name)
    has_kernels = found is not None and found.name == name
    assert has_kernels == (flags >= NEEDED[name]), "install again: pip install -e ."


def test_the_build_knows_every_source_and_header() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extension,) = settings["tool"]["setuptools"]["ext-modules"]
    folder = ROOT / "kernels/triptych_kernels/cpu"
    for kind, names in (("*.cpp", extension["sources"]), ("*.h", extension["depends"])):
        assert {str(file.relative_to(ROOT)) for file in folder.rglob(kind)} == set(names)


@pytest.mark.parametrize("widest", cpu.ISAS)
def test_the_table_says_what_it_runs_on_and_that_it_is_batch_invariant(widest: str) -> None:
    native, found = cpu.native_ops(widest), find_isa(widest)
    if native is None or found is None:
        pytest.skip("no native CPU kernels on this machine")
    names = {"amx": "native-cpu-amx", "avx512": "native-cpu", "avx2": "native-cpu-avx2"}
    assert (native.name, native.is_batch_invariant) == (names[found.name], True)
    assert cpu.ISAS.index(found.name) >= cpu.ISAS.index(widest)


def test_an_instruction_set_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="the instruction set is 'sse', not one of"):
        find_isa("sse")


def test_a_module_tells_kernels_that_it_has_from_others() -> None:
    native = pytest.importorskip("triptych_kernels.cpu._native")
    with pytest.raises(ValueError, match="there are no kernels for 'neon'"):
        native.supports("neon")


def test_a_system_that_keeps_amx_to_itself_is_told_of(monkeypatch, caplog) -> None:
    native = pytest.importorskip("triptych_kernels.cpu._native")
    monkeypatch.setattr(native, "request_amx", lambda: errno.ENOSPC)
    assert not can_use_amx(native)
    assert "AMX of this CPU is not used" in caplog.text


def test_without_the_compiled_module_the_reference_runs_and_one_line_says_so(tmp_path: Path) -> None:
    source = Path(triptych_kernels.__file__).parent
    shutil.copytree(
        source, tmp_path / "triptych_kernels", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    )
    program = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
import torch, triptych_kernels
from triptych_kernels import cpu
for _ in range(2):
    print(triptych_kernels.__file__, triptych_kernels.ops_for(torch.device("cpu")).name, cpu.num_threads())
cpu.set_num_threads(2)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines() == [f"{tmp_path}/triptych_kernels/__init__.py reference 1"] * 2
    assert done.stderr.count("native CPU kernels are missing") == 1
