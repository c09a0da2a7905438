"""Memory of packed weights."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from torch import Tensor

from tests.resident import resident_mib
from triptych_kernels.cpu.loader import native_module
from triptych_kernels.cpu.panel_memory import PanelMemory

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
