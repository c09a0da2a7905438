"""How long work takes on a device, and what the device can do at most. Knows no op and no model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

# Larger than the last cache of any GPU.
_FLUSH_BYTES = 1 << 29
# About a millisecond: the host has launched all of a call before the GPU comes to it.
_HEAD_START_CYCLES = 2_000_000
_COPY_BYTES = 1 << 32
_MATMUL_SIZE = 8_192


def median_us(work: Callable[[], object], device: torch.device, *, num_repeats: int) -> float:
    """The median time of one call; on a GPU by events, with nothing of it in the GPU's caches."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        return statistics.median(_host_us(work) for _ in range(num_repeats))
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    return statistics.median(_device_us(work, flush) for _ in range(num_repeats))


def copy_bandwidth(device: torch.device, num_bytes: int = _COPY_BYTES) -> float:
    """Bytes per second that a large copy reads and writes together, at best."""
    source = torch.empty(num_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _best_s(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = _MATMUL_SIZE) -> float:
    """Floating point operations per second of a large square product, at best."""
    left = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _best_s(lambda: torch.mm(left, left), device)


def _host_us(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return (time.perf_counter() - started_at) * 1e6


def _device_us(work: Callable[[], object], flush: Tensor) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    torch.cuda._sleep(_HEAD_START_CYCLES)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _best_s(work: Callable[[], object], device: torch.device, num_repeats: int = 10) -> float:
    for _ in range(3):
        work()
    if device.type != "cuda":
        return min(_host_us(work) for _ in range(num_repeats)) / 1e6
    times = []
    for _ in range(num_repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)
