"""The free memory of the machine or container, and the CUDA devices of the driver. Imports no torch."""

from __future__ import annotations

import ctypes
from pathlib import Path

MIB = 1 << 20
CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_host_bytes(control_group: Path = CONTROL_GROUP) -> tuple[int, str]:
    """Bytes that the machine has free, or the container with its limits in `control_group`, also in words."""
    # Imported here: with a GPU it is not needed.
    import psutil

    free: int = psutil.virtual_memory().available
    left = _left_of_container(control_group)
    if left is not None and left < free:
        return left, f"{left // MIB} MiB that the container has left"
    return free, f"{free // MIB} MiB free memory"


def cuda_device_bytes() -> list[int]:
    """The memory of each CUDA device that this process may use; empty without a device or a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    sizes = []
    for index in range(count.value):
        device, size = ctypes.c_int(), ctypes.c_size_t()
        if not driver.cuDeviceGet(ctypes.byref(device), index):
            driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
            sizes.append(size.value)
    return sizes


def _left_of_container(control_group: Path) -> int | None:
    """Free bytes below the container's memory limit, as seen from inside; None without a limit."""
    try:
        limit = (control_group / "memory.max").read_text(encoding="ascii").strip()
        used = int((control_group / "memory.current").read_text(encoding="ascii"))
        return None if limit == "max" else max(0, int(limit) - used + _cached_bytes(control_group))
    except (OSError, ValueError):
        return None


def _cached_bytes(control_group: Path) -> int:
    """Cached pages of files, such as weights that were read: they count as used, and are freed on demand."""
    path = control_group / "memory.stat"
    lines = path.read_text(encoding="ascii").splitlines() if path.is_file() else []
    values = dict(line.split(maxsplit=1) for line in lines)
    return int(values.get("active_file", 0)) + int(values.get("inactive_file", 0))
