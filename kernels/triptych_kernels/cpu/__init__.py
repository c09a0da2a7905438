"""Native CPU kernels, compiled at installation: the table of ops made of them, where they are and can run."""

from __future__ import annotations

import dataclasses
import functools

from triptych_kernels.cpu.loader import can_run_native
from triptych_kernels.ops import Ops
from triptych_kernels.reference import REFERENCE

__all__ = ["native_ops", "num_threads", "set_num_threads"]


@functools.cache
def native_ops() -> Ops | None:
    """The native ops, or None where the compiled module is missing or needs another CPU."""
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

    return dataclasses.replace(
        REFERENCE,
        name="native-cpu",
        is_batch_invariant=True,
        needs_clean_blocks=False,
        pack_linear=pack_linear,
        pack_gated_linear=pack_gated_linear,
        pack_experts=pack_experts,
        kv_write=kv_write,
        paged_attention=paged_attention,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary_kv_write=rotary_kv_write,
        silu_and_mul=silu_and_mul,
        greedy=greedy,
        greedy_linear=greedy_linear,
        penalise=penalise,
    )


def set_num_threads(num_threads: int) -> None:
    """Let each call use so many threads, the caller's included; nothing happens without native ops."""
    if native_ops() is not None:
        from triptych_kernels.cpu import _native

        _native.set_num_threads(num_threads)


def num_threads() -> int:
    """How many threads a native call may use: 1 until set."""
    if native_ops() is None:
        return 1
    from triptych_kernels.cpu import _native

    return _native.num_threads()
