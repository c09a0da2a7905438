"""When there are native ops, and what happens where there are none."""

from __future__ import annotations

import errno
import importlib
import itertools
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

import triptych_kernels
from tests.resident import resident_mib
from triptych_kernels import cpu
from triptych_kernels.cpu.loader import can_use_amx, find_isa, native_module
from triptych_kernels.cpu.panel_memory import PanelMemory
from triptych_kernels.ops import Ops

AVX2 = {"avx2", "fma", "bmi1", "bmi2"}
NEEDED = {
    "avx2": AVX2,
    "avx512": AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_bf16"},
}
CPU_INFO = Path("/proc/cpuinfo")
ROOT = Path(__file__).resolve().parents[3]


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


def test_an_unknown_instruction_set_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="the instruction set is 'sse', not one of"):
        find_isa("sse")


def test_a_module_distinguishes_its_kernels_from_others() -> None:
    native = importlib.import_module("triptych_kernels.cpu._native")
    with pytest.raises(ValueError, match="there are no kernels for 'neon'"):
        native.supports("neon")


def test_a_system_that_does_not_permit_amx_is_logged(monkeypatch, caplog) -> None:
    native = importlib.import_module("triptych_kernels.cpu._native")
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


# The pool of threads behind the native kernels.


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_each_task_runs_once(use_threads: Callable[[int], None], num_threads: int) -> None:
    from triptych_kernels.cpu import _native

    use_threads(num_threads)
    for num_tasks in (0, 1, 2, 7, 1000):
        for _ in range(50):
            assert _native.count_task_runs(num_tasks) == b"\1" * num_tasks


def test_a_job_of_many_tasks_behind_one_of_few_is_not_entered_before_it_is_open(use_threads):
    from triptych_kernels.cpu import _native

    use_threads(4)
    for _ in range(20_000):
        assert _native.count_task_runs(3) == b"\1" * 3
        assert _native.count_task_runs(64) == b"\1" * 64


def test_one_thread_is_the_default_and_the_number_is_kept(use_threads: Callable[[int], None]) -> None:
    assert cpu.num_threads() == 1
    use_threads(3)
    assert cpu.num_threads() == 3


@pytest.mark.parametrize("number", [0, -1, 1025])
def test_a_number_of_threads_out_of_range_is_refused(ops: Ops, number: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads is {number}"):
        cpu.set_num_threads(number)


def test_calls_of_two_threads_at_once_both_finish(use_threads: Callable[[int], None], ops: Ops) -> None:
    use_threads(3)
    linear = ops.pack_linear(torch.ones(700, 1024))
    x = torch.ones(40, 1024)
    with ThreadPoolExecutor(2) as executor:
        results = list(executor.map(lambda _: linear(x), range(40)))
    assert all(torch.equal(result, torch.full((40, 700), 1024.0)) for result in results)


def test_a_forked_process_gets_threads_of_its_own(use_threads: Callable[[int], None]) -> None:
    from triptych_kernels.cpu import _native

    use_threads(3)
    assert _native.count_task_runs(100) == b"\1" * 100
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_count_in_child, args=(theirs,), daemon=True)
    child.start()
    try:
        assert ours.poll(timeout=60) and ours.recv_bytes() == b"\1" * 100
        child.join(timeout=60)
        assert child.exitcode == 0
    finally:
        child.kill()


def _count_in_child(pipe: Connection) -> None:
    from triptych_kernels.cpu import _native

    pipe.send_bytes(_native.count_task_runs(100))


# Memory of packed weights.

_MIB = 1 << 20


def chunk_of(piece: Tensor) -> int:
    return piece.untyped_storage().data_ptr()


def is_in_large_pages(address: int) -> bool:
    """Whether the system was asked for them there."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and ":" not in first:
            start, end = (int(number, 16) for number in first.split("-"))
            is_there = start <= address < end
        elif is_there and first == "VmFlags:":
            return "hg" in rest.split()
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_pieces_lie_side_by_side_and_share_no_byte() -> None:
    rng, memory = random.Random(0), PanelMemory()
    pieces = [memory.take(rng.randrange(1, 3 * _MIB)) for _ in range(100)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(number)
    for number, piece in enumerate(pieces):
        assert (piece == number).all()
    neighbours = [
        after.data_ptr() - (before.data_ptr() + before.nbytes)
        for before, after in itertools.pairwise(pieces)
        if chunk_of(before) == chunk_of(after)
    ]
    assert len(neighbours) >= 90 and all(0 <= gap < 64 for gap in neighbours)


@pytest.mark.skipif(native_module() is None, reason="needs the compiled kernels")
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages"
)
def test_pieces_of_chunks_lie_in_large_pages() -> None:
    memory = PanelMemory()
    for num_bytes in (1, _MIB, 30 * _MIB + 1, 3 * _MIB):
        piece = memory.take(num_bytes)
        assert is_in_large_pages(piece.data_ptr())
        assert is_in_large_pages(piece.data_ptr() + num_bytes - 1)


def test_a_piece_larger_than_a_chunk_is_kept_by_no_other() -> None:
    memory = PanelMemory()
    first, large, second = memory.take(_MIB), memory.take(101 * _MIB), memory.take(_MIB)
    assert chunk_of(first) == chunk_of(second) != chunk_of(large)
    before = resident_mib()
    large.fill_(1)
    assert resident_mib() - before > 95
    del large
    assert resident_mib() - before < 5


def test_memory_goes_with_its_pieces() -> None:
    memory = PanelMemory()
    before = resident_mib()
    pieces = [memory.take(5 * _MIB).fill_(1) for _ in range(30)]
    assert resident_mib() - before > 145
    del pieces
    assert resident_mib() - before < 10
    assert memory.take(_MIB).fill_(2).sum() == 2 * _MIB
