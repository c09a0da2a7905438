"""The native ops, and a compiled module that goes back to one thread after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from triptych_kernels import cpu
from triptych_kernels.cpu.loader import Isa, find_isa
from triptych_kernels.ops import Ops


@pytest.fixture(params=cpu.ISAS)
def isa(request: pytest.FixtureRequest) -> Isa:
    """Each instruction set of this CPU; skipped for the others: test_loader.py says which may be."""
    found = find_isa(request.param)
    if found is None or found.name != request.param:
        pytest.skip(f"no kernels for {request.param} on this machine")
    return found


@pytest.fixture
def ops(isa: Isa) -> Ops:
    native = cpu.native_ops(isa.name)
    assert native is not None
    return native


@pytest.fixture
def use_threads(ops: Ops) -> Iterator[Callable[[int], None]]:
    yield cpu.set_num_threads
    cpu.set_num_threads(1)
