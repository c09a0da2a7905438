"""The table of native CPU ops, which are compiled at installation, if they exist and run on this CPU."""

from __future__ import annotations

import dataclasses
import functools

from triptych_kernels.cpu.loader import ISAS, find_isa, native_module
from triptych_kernels.ops import Ops
from triptych_kernels.reference import REFERENCE

__all__ = ["ISAS", "native_ops", "num_threads", "set_num_threads"]

_NAMES = {"amx": "native-cpu-amx", "avx512": "native-cpu", "avx2": "native-cpu-avx2"}


@functools.cache
def native_ops(widest: str = "amx") -> Ops | None:
    """The native ops, or None if the compiled module is missing or needs another CPU.

    widest: the widest of ISAS to use. Results differ between instruction sets by rounding.
    """
    isa = find_isa(widest)
    if isa is None:
        return None
    # Imported here: without the compiled module not all of these can be imported.
    from triptych_kernels.cpu import (
        attention,
        elementwise,
        experts,
        fused_encoder,
        fused_layers,
        linear,
        low_rank,
        parts,
        penalties,
        states,
        token_mask,
    )

    return dataclasses.replace(
        REFERENCE,
        name=_NAMES[isa.name],
        is_batch_invariant=True,
        needs_clean_blocks=False,
        reads_common_blocks=True,
        activations=("int8", "exact"),
        pack_linear=functools.partial(linear.pack_linear, isa),
        pack_gated_linear=functools.partial(linear.pack_gated_linear, isa),
        pack_experts=functools.partial(experts.pack_experts, isa),
        pack_low_rank=low_rank.pack_low_rank,
        make_low_rank=functools.partial(low_rank.make_low_rank, isa),
        fuse_layers=functools.partial(fused_layers.fuse_layers, isa),
        fuse_encoder=functools.partial(fused_encoder.fuse_encoder, isa),
        kv_write=functools.partial(elementwise.kv_write, isa),
        paged_attention=functools.partial(attention.paged_attention, isa),
        rms_norm=functools.partial(elementwise.rms_norm, isa),
        add_rms_norm=functools.partial(elementwise.add_rms_norm, isa),
        rotary_kv_write=functools.partial(elementwise.rotary_kv_write, isa),
        causal_conv=functools.partial(states.causal_conv, isa),
        ssd_scan=functools.partial(states.ssd_scan, isa),
        gated_delta_rule=functools.partial(states.gated_delta_rule, isa),
        silu_and_mul=functools.partial(elementwise.gate_and_mul, isa, "silu"),
        gelu_tanh_and_mul=functools.partial(elementwise.gate_and_mul, isa, "gelu_tanh"),
        sigmoid_and_mul=functools.partial(elementwise.gate_and_mul, isa, "sigmoid"),
        greedy=functools.partial(elementwise.greedy, isa),
        greedy_linear=linear.greedy_linear,
        look_up=linear.look_up,
        take_apart=functools.partial(parts.take_apart, isa),
        put_together=functools.partial(parts.put_together, isa),
        penalise=penalties.penalise,
        apply_token_mask=token_mask.apply_token_mask,
    )


def set_num_threads(num_threads: int) -> None:
    """Let each call use `num_threads` threads, including the caller's. No effect without native ops."""
    native = native_module()
    if native is not None:
        native.set_num_threads(num_threads)


def num_threads() -> int:
    """Number of threads that a native call may use: 1 until set."""
    native = native_module()
    return 1 if native is None else native.num_threads()
