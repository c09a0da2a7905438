"""The native ops, and a compiled module that goes back to one thread after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from triptych_kernels import cpu
from triptych_kernels.ops import Ops


@pytest.fixture(params=["native-cpu", "native-cpu-amx"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """The native ops; their tests are skipped where there are none: test_loader.py says where that may be."""
    native = cpu.native_ops(with_amx=request.param == "native-cpu-amx")
    if native is None or native.name != request.param:
        pytest.skip(f"no {request.param} on this machine")
    return native


@pytest.fixture
def use_threads(ops: Ops) -> Iterator[Callable[[int], None]]:
    """Sets how many threads a call uses."""
    yield cpu.set_num_threads
    cpu.set_num_threads(1)
