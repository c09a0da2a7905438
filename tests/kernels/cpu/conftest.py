"""The native ops, and a compiled module that goes back to one thread after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from triptych_kernels import cpu
from triptych_kernels.ops import Ops


@pytest.fixture
def ops() -> Ops:
    """The native ops; their tests are skipped where there are none: test_loader.py says where that may be."""
    native = cpu.native_ops()
    if native is None:
        pytest.skip("no native CPU kernels on this machine")
    return native


@pytest.fixture
def use_threads(ops: Ops) -> Iterator[Callable[[int], None]]:
    """Sets how many threads a call uses."""
    yield cpu.set_num_threads
    cpu.set_num_threads(1)
