"""Every op as a Triton kernel, for CUDA devices. Importing this package needs triton.

Knows no model and no request.
"""

from __future__ import annotations

import functools

from triptych_kernels.ops import Ops
from triptych_kernels.reference.low_rank import pack_low_rank
from triptych_kernels.triton.activation import gelu_tanh_and_mul, sigmoid_and_mul, silu_and_mul
from triptych_kernels.triton.causal_conv import causal_conv
from triptych_kernels.triton.fused_moe import pack_experts
from triptych_kernels.triton.gated_delta_rule import gated_delta_rule
from triptych_kernels.triton.kv_write import kv_write
from triptych_kernels.triton.linear import pack_gated_linear, pack_linear
from triptych_kernels.triton.low_rank import make_low_rank
from triptych_kernels.triton.paged_attention import paged_attention
from triptych_kernels.triton.penalties import penalise
from triptych_kernels.triton.rms_norm import add_rms_norm, rms_norm
from triptych_kernels.triton.rotary import rotary_kv_write
from triptych_kernels.triton.sampling import greedy, greedy_linear, sample
from triptych_kernels.triton.ssd_scan import ssd_scan
from triptych_kernels.triton.token_mask import apply_token_mask

__all__ = ["triton_ops"]


def triton_ops(*, deterministic: bool = False) -> Ops:
    """The table for a GPU.

    deterministic: tiles of one shape and one order of summation for all sizes, so that a token's result has
    the same bits in every batch. Projections are then computed by Triton instead of cuBLAS, and the keys of a
    long row are not split.
    """
    return Ops(
        name="triton-deterministic" if deterministic else "triton",
        is_batch_invariant=deterministic,
        needs_clean_blocks=False,
        reads_common_blocks=False,
        activations=("exact",),
        pack_linear=functools.partial(pack_linear, deterministic=deterministic),
        pack_gated_linear=functools.partial(pack_gated_linear, deterministic=deterministic),
        pack_experts=functools.partial(pack_experts, deterministic=deterministic),
        kv_write=kv_write,
        paged_attention=functools.partial(paged_attention, num_splits=1)
        if deterministic
        else paged_attention,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary_kv_write=rotary_kv_write,
        causal_conv=causal_conv,
        ssd_scan=functools.partial(ssd_scan, chunked=False) if deterministic else ssd_scan,
        gated_delta_rule=functools.partial(gated_delta_rule, chunked=False)
        if deterministic
        else gated_delta_rule,
        silu_and_mul=silu_and_mul,
        gelu_tanh_and_mul=gelu_tanh_and_mul,
        sigmoid_and_mul=sigmoid_and_mul,
        greedy=greedy,
        greedy_linear=greedy_linear,
        sample=sample,
        apply_token_mask=apply_token_mask,
        penalise=penalise,
        pack_low_rank=pack_low_rank,
        make_low_rank=make_low_rank,
    )
