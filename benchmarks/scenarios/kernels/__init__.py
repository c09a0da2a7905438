"""Every op at the shapes of a decoder, beside its reference and, where torch has one, torch's own.

    python -m benchmarks kernels --device cpu --json kernels.json

On a GPU the ops are Triton kernels and the shapes those of Llama-3.1-8B, with as many and as large experts as
Qwen3-30B-A3B has, and states as large as Qwen3-Next's; on a CPU they are the native kernels where those were
built, at the shapes of SmolLM2-135M, with the states of a model of that size.
Times are medians of one call, on a GPU with cold caches. A rate is of the bytes or operations that cannot be
avoided. Ratios above 1 mean that ours is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from benchmarks.report import Report, Row
from benchmarks.scenarios.kernels.cases import CaseMaker, DecoderShape, KernelCase
from benchmarks.scenarios.kernels.timing import median_us
from triptych_kernels import REFERENCE, Ops, ops_for

GPU_SHAPE = DecoderShape(
    hidden_size=4096, intermediate_size=14_336, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128_256, num_experts=128, num_chosen=8, expert_size=768, num_state_heads=32, state_size=128,
    num_rows=(1, 32, 256), context=1024, prompt=4096,
)  # fmt: skip
CPU_SHAPE = DecoderShape(
    hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49_152,
    num_experts=8, num_chosen=2, expert_size=384, num_state_heads=16, state_size=128, num_rows=(1, 8, 32),
    context=512, prompt=256,
)  # fmt: skip


def measure_all(
    shape: DecoderShape, ops: Ops, device: torch.device, dtype: torch.dtype, *, num_repeats: int
) -> Iterator[Row]:
    with torch.inference_mode():
        for case in CaseMaker(shape, device, dtype).all_cases():
            yield _measure(case, ops, device, num_repeats)


def _measure(case: KernelCase, ops: Ops, device: torch.device, num_repeats: int) -> Row:
    def timed(table: Ops) -> float | None:
        try:
            call = case.make(table)
        except ValueError:
            # The op refuses the weights' form on this device.
            return None
        return median_us(call, device, num_repeats=num_repeats)

    ours = timed(ops)
    reference = None if ops is REFERENCE else timed(REFERENCE)
    torch_us = None
    if case.torch_call is not None:
        torch_us = median_us(case.torch_call, device, num_repeats=num_repeats)
    is_compute = case.num_operations > 0
    amount = case.num_operations / 1e6 if is_compute else case.num_bytes / 1e3
    return {
        "op": case.op,
        "shape": case.shape,
        "ours_us": ours,
        "reference_us": reference,
        "torch_us": torch_us,
        "rate": None if ours is None else amount / ours,
        "unit": "TFLOP/s" if is_compute else "GB/s",
        "gb_per_s": None if ours is None else case.num_bytes / 1e3 / ours,
        "over_reference": _ratio(reference, ours),
        "over_torch": _ratio(torch_us, ours),
    }


def _ratio(other: float | None, ours: float | None) -> float | None:
    return None if other is None or ours is None else other / ours


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: a GPU if any")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--deterministic", action="store_true", help="the ops of deterministic mode")
    parser.add_argument("--num-repeats", type=int, default=30)
    parser.add_argument("--num-threads", type=int, default=1, help="of torch, on a CPU")


def run(options: argparse.Namespace) -> Report:
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device here")
    device = torch.device(name)
    torch.set_num_threads(options.num_threads)
    ops = ops_for(device, deterministic=options.deterministic)
    shape = GPU_SHAPE if name == "cuda" else CPU_SHAPE
    dtype = getattr(torch, options.dtype)
    rows = list(measure_all(shape, ops, device, dtype, num_repeats=options.num_repeats))
    settings = {"device": name if name == "cpu" else torch.cuda.get_device_name(), "ops": ops.name}
    names = ("dtype", "deterministic", "num_repeats", "num_threads")
    return Report("kernels", settings | {name: getattr(options, name) for name in names}, rows)
