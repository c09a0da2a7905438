"""Models and kernels on a CPU without AVX-512, whatever this one has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from triptych_kernels import cpu
from triptych_kernels.cpu.loader import find_isa

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0
# Tests of the native kernels alone run with each instruction set of the CPU anyway.
FILES = (
    "tests/kernels/test_paged_attention.py",
    "tests/kernels/test_reference_layers.py",
    *(
        f"tests/engine_svc/model/native/test_native_decoder.py::test_{name}"
        for name in (
            "logits_are_within_1e_4_of_eager_at_every_place",
            "logits_have_the_same_bits_however_the_prompt_is_cut",
            "layers_as_one_op_have_the_bits_of_their_ops",
        )
    ),
    "tests/engine_svc/model/transformers/test_packing.py",
    "tests/engine_svc/model/transformers/test_even_functions.py::test_models_with_narrow_gates_are_deterministic_by_it",
    "tests/system/test_determinism.py::test_the_same_logits_bit_by_bit_in_every_situation"
    "[llama-transformers-bfloat16-auto]",
)


def test_models_and_kernels_pass_their_tests_with_avx2_alone() -> None:
    widest = find_isa(cpu.ISAS[0])
    if widest is None or widest.name == "avx2":
        pytest.skip("this CPU has no wider instructions: the tests themselves run with AVX2 alone")
    command = [sys.executable, "-m", "pytest", "-p", "tests.avx2_cpu", "-p", "no:cacheprovider", *FILES]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "cpu: torch AVX2, ops native-cpu-avx2" in ended.stdout
