"""Every op in plain torch: the specification, and the implementation where there is no faster kernel.

Knows no model, no request and no device but that of its tensors.
"""

from triptych_kernels.ops import Ops
from triptych_kernels.reference.activation import gelu_tanh_and_mul, sigmoid_and_mul, silu_and_mul
from triptych_kernels.reference.causal_conv import causal_conv
from triptych_kernels.reference.gated_delta_rule import gated_delta_rule
from triptych_kernels.reference.kv_write import kv_write
from triptych_kernels.reference.linear import pack_gated_linear, pack_linear
from triptych_kernels.reference.low_rank import make_low_rank, pack_low_rank
from triptych_kernels.reference.moe import pack_experts
from triptych_kernels.reference.norm import add_rms_norm, rms_norm
from triptych_kernels.reference.paged_attention import paged_attention
from triptych_kernels.reference.penalties import penalise
from triptych_kernels.reference.rotary import rotary_kv_write
from triptych_kernels.reference.sampling import greedy, greedy_linear, sample, uniform_noise
from triptych_kernels.reference.ssd_scan import ssd_scan
from triptych_kernels.reference.token_mask import apply_token_mask

REFERENCE = Ops(
    name="reference",
    is_batch_invariant=False,
    needs_clean_blocks=True,
    reads_common_blocks=False,
    activations=("exact",),
    pack_linear=pack_linear,
    pack_gated_linear=pack_gated_linear,
    pack_experts=pack_experts,
    kv_write=kv_write,
    paged_attention=paged_attention,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rotary_kv_write=rotary_kv_write,
    causal_conv=causal_conv,
    ssd_scan=ssd_scan,
    gated_delta_rule=gated_delta_rule,
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

__all__ = ["REFERENCE", "uniform_noise"]
