"""Requests to the system about a CPU tensor's memory. They have no effect without the compiled module."""

from __future__ import annotations

from triptych_kernels.cpu.loader import native_module

LARGE_PAGE_BYTES = 2 << 20  # on most systems


def prefer_large_pages(address: int, num_bytes: int) -> None:
    """Request large pages, which have fewer TLB misses and page faults, for a range not touched yet."""
    native = native_module()
    if native is not None:
        native.prefer_pages(address, num_bytes, True)


def prefer_small_pages(address: int, num_bytes: int) -> None:
    """Request small pages, of which little use takes little memory, for a range that is not yet touched."""
    native = native_module()
    if native is not None:
        native.prefer_pages(address, num_bytes, False)


def populate(address: int, num_bytes: int) -> bool:
    """Have the system allocate memory for a range, as stores would; its content is not changed.

    Returns False without effect if a part is not mapped, or if the system does not support it (Linux before
    5.14). Other threads run meanwhile.
    """
    native = native_module()
    return native is not None and native.populate(address, num_bytes)
