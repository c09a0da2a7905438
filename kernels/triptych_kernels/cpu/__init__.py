"""Native CPU kernels, compiled at installation: the table of ops made of them, where they are and can run."""

from __future__ import annotations

import dataclasses
import functools

from torch import Tensor

from triptych_kernels.cpu.loader import can_run_native, can_use_amx
from triptych_kernels.ops import Ops
from triptych_kernels.reference import REFERENCE

__all__ = ["native_ops", "num_threads", "prefer_large_pages", "set_num_threads"]


@functools.cache
def native_ops(*, with_amx: bool = True) -> Ops | None:
    """The native ops, or None where the compiled module is missing or needs another CPU.

    with_amx: whether they use the matrix unit of a CPU that has one, with other roundings.
    """
    if not can_run_native():
        return None
    # Here and not above: without the compiled module these cannot be imported.
    from triptych_kernels.cpu.attention import paged_attention
    from triptych_kernels.cpu.elementwise import (
        add_rms_norm,
        greedy,
        kv_write,
        rms_norm,
        rotary_kv_write,
        silu_and_mul,
    )
    from triptych_kernels.cpu.experts import pack_experts
    from triptych_kernels.cpu.linear import greedy_linear, pack_gated_linear, pack_linear
    from triptych_kernels.cpu.penalties import penalise

    has_amx = with_amx and can_use_amx()
    return dataclasses.replace(
        REFERENCE,
        name="native-cpu-amx" if has_amx else "native-cpu",
        is_batch_invariant=True,
        needs_clean_blocks=False,
        pack_linear=functools.partial(pack_linear, with_amx=has_amx),
        pack_gated_linear=functools.partial(pack_gated_linear, with_amx=has_amx),
        pack_experts=functools.partial(pack_experts, with_amx=has_amx),
        kv_write=kv_write,
        paged_attention=functools.partial(paged_attention, with_amx=has_amx),
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary_kv_write=rotary_kv_write,
        silu_and_mul=silu_and_mul,
        greedy=greedy,
        greedy_linear=greedy_linear,
        penalise=penalise,
    )


def prefer_large_pages(memory: Tensor) -> None:
    """Ask for large pages, which are quicker to find and to get; nothing happens without native ops.

    memory: contiguous, on the CPU, not yet touched.
    """
    if can_run_native():
        from triptych_kernels.cpu import _native

        _native.prefer_large_pages(memory.data_ptr(), memory.nbytes)


def set_num_threads(num_threads: int) -> None:
    """Let each call use so many threads, the caller's included; nothing happens without native ops."""
    if can_run_native():
        from triptych_kernels.cpu import _native

        _native.set_num_threads(num_threads)


def num_threads() -> int:
    """How many threads a native call may use: 1 until set."""
    if not can_run_native():
        return 1
    from triptych_kernels.cpu import _native

    return _native.num_threads()
