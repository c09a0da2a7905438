"""What a CPU's tensors may ask of the system about memory; nothing happens without the compiled module."""

from __future__ import annotations

from triptych_kernels.cpu.loader import native_module

LARGE_PAGE_BYTES = 2 << 20  # as most systems have them


def prefer_large_pages(address: int, num_bytes: int) -> None:
    """Ask for large pages, which are quicker to find and to get, within a range that is not yet touched."""
    native = native_module()
    if native is not None:
        native.prefer_pages(address, num_bytes, True)


def prefer_small_pages(address: int, num_bytes: int) -> None:
    """Ask for small pages, of which a little use takes little, within a range that is not yet touched."""
    native = native_module()
    if native is not None:
        native.prefer_pages(address, num_bytes, False)


def populate(address: int, num_bytes: int) -> bool:
    """Have the system find memory for a range, as storing there would; what is stored there stays.

    False, and nothing happens, where something is not mapped, and on systems that cannot (Linux before
    5.14). Other threads run meanwhile.
    """
    native = native_module()
    return native is not None and native.populate(address, num_bytes)
