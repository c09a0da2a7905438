"""The skips that a suite may have: what the machine or the checkout decides, with the reason of each."""

from __future__ import annotations

import re

_EMULATED = "a CPU with these instructions, or make test-emulated"

# Where, the reason that pytest shows, and which machine runs it.
ALLOWED_SKIPS = (
    ("tests/gpu/", "needs a CUDA device", "make test-gpu where there is one; tests/fake_gpu"),
    ("tests/benchmarks/test_gpu.py", "there is a CUDA device", "a machine without one"),
    ("tests/kernels/cpu/", r"no kernels for \w+ on this machine", _EMULATED),
    ("tests/kernels/cpu/", "this system does not tell what its CPU has", "Linux on x86"),
    ("tests/kernels/cpu/", "no native CPU kernels on this machine", "a CPU with AVX2"),
    ("tests/kernels/cpu/", "needs the compiled kernels", "a CPU with AVX2"),
    ("tests/kernels/cpu/", "the system has no large pages", "Linux with transparent large pages"),
    ("tests/engine_svc/", "this machine has no native kernels", "a CPU with AVX2"),
    ("tests/engine_svc/", "needs the compiled kernels", "a CPU with AVX2"),
    ("tests/engine_svc/", "where rows are not kept apart", "a CPU with AVX2"),
    ("tests/engine_svc/", "needs several cores", "two cores"),
    ("tests/system/test_determinism.py", r"this CPU has no \w+", _EMULATED),
    ("tests/system/test_determinism.py", "this machine has no native kernels", "a CPU with AVX2"),
    ("tests/system/test_avx2_cpu.py", "tests themselves run with AVX2 alone", "a CPU that has wider ones"),
    ("tests/polyglot/", r"\w+: missing ", "make test-polyglot REQUIRE=NAME"),
    ("tests/polyglot/", "no package has dotnet", "none: the example is read by its users"),
    ("tests/architecture/test_results.py", "the history is not here", "a clone with all commits"),
    ("tests/contract/test_go_frontend.py", "go: missing ", "make test-polyglot REQUIRE=go"),
)  # fmt: skip


def is_allowed(test: str, reason: str) -> bool:
    """Whether the list has this skip, of a test named by its id."""
    return any(test.startswith(where) and re.search(pattern, reason) for where, pattern, _ in ALLOWED_SKIPS)
