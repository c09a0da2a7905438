"""A program that compiles every kernel for one GPU, with none at hand: launches become compilations.

    python -m tests.kernels.triton.compile_all

Prints JSON: for each kernel the most shared memory that any of its forms takes, in bytes.
"""

from __future__ import annotations

import json

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.scenarios.kernels.cases import CaseMaker, DecoderShape
from triptych_kernels import AttentionBatch, ExpertBiases, Ops
from triptych_kernels.triton import triton_ops

_CPU = torch.device("cpu")
_SHAPE = DecoderShape(
    hidden_size=256, intermediate_size=384, num_heads=8, num_kv_heads=2, head_dim=128, vocab_size=10_000,
    num_experts=8, num_chosen=2, expert_size=64, num_state_heads=4, state_size=128, num_rows=(1, 40),
    context=1100, prompt=700,
)  # fmt: skip


class AbsentGPU:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, compute_capability: int = 90) -> None:
        self._compute_capability = compute_capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._compute_capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return _CPU


def compile_all() -> dict[str, int]:
    """Shared memory by kernel, once all of them are compiled."""
    shared: dict[str, int] = {}
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        name = self.fn.__name__
        shared[name] = max(shared.get(name, 0), kernel.metadata.shared)
        return kernel

    driver.set_active(AbsentGPU())
    JITFunction.run = compile_only
    for ops, dtype in (
        (triton_ops(), torch.bfloat16),
        (triton_ops(deterministic=True), torch.bfloat16),
        (triton_ops(), torch.float32),
    ):
        for case in CaseMaker(_SHAPE, _CPU, dtype).all_cases():
            # Triton's table leaves layers to their ops.
            if case.op not in ("fuse_encoder", "fuse_layers"):
                case.make(ops)()
    launch_rare_forms(triton_ops(), torch.bfloat16)
    return shared


def launch_rare_forms(ops: Ops, dtype: torch.dtype) -> None:
    """What no decoder of the plain shape asks for."""
    heads, dim = _SHAPE.num_heads, _SHAPE.head_dim
    kv_heads = _SHAPE.num_kv_heads
    keys = torch.zeros(80, kv_heads, 16, dim, dtype=dtype)
    table = torch.arange(80, dtype=torch.int32)[None]
    for length in (1, 50):
        query = torch.zeros(length, heads, dim, dtype=dtype)
        batch = AttentionBatch.of(table, [length], [1200], 16)
        for options in (
            {"window": 100},
            {"sinks": torch.zeros(heads, dtype=dtype)},
            {"soft_cap": 30.0, "window": 100},
            {"num_splits": 4} if length == 1 else {},
        ):
            ops.paged_attention(query, keys, keys, batch, scale=0.1, **options)
    addend = torch.zeros(3, 32)
    triton_ops(deterministic=True).pack_linear(torch.zeros(32, 64, dtype=dtype))(
        torch.zeros(3, 64, dtype=dtype), addend
    )
    qkv = torch.zeros(3, (heads + 2 * kv_heads) * dim, dtype=dtype)
    slots = torch.arange(3)
    for weight in (torch.ones(dim, dtype=dtype), torch.ones(dim)):
        ops.rms_norm(qkv.view(-1, dim), weight, 1e-6)
        ops.rotary_kv_write(
            qkv, slots, torch.zeros(9, dim), slots, keys, keys,
            num_heads=heads, query_norm=weight, key_norm=weight, eps=1e-6,
        )  # fmt: skip
    weight = torch.zeros(_SHAPE.intermediate_size, _SHAPE.hidden_size, dtype=dtype)
    gates, downs = torch.zeros(4, 128, 96, dtype=dtype), torch.zeros(4, 96, 64, dtype=dtype)
    biases = ExpertBiases(torch.zeros(4, 128, dtype=dtype), torch.zeros(4, 96, dtype=dtype))
    experts = ops.pack_experts(gates, downs, biases=biases, gate="clamped_swiglu")
    experts(torch.zeros(3, 96, dtype=dtype), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    for quantization in ("int8", "fp8"):
        ops.pack_linear(weight, quantization=quantization)(torch.zeros(5, _SHAPE.hidden_size, dtype=dtype))


if __name__ == "__main__":
    print(json.dumps(compile_all()))
