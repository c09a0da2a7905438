"""Entry point of the ops: selects, once, the implementation that serves a device."""

from __future__ import annotations

import torch

from triptych_kernels import cpu
from triptych_kernels.attention_batch import AttentionBatch
from triptych_kernels.cpu.memory import LARGE_PAGE_BYTES, populate, prefer_large_pages, prefer_small_pages
from triptych_kernels.cpu.panel_memory import own_panels
from triptych_kernels.ops import (
    SUMS_VERSION,
    DenseLayer,
    EncoderLayer,
    ExpertBiases,
    Experts,
    FusedEncoder,
    FusedLayers,
    LayerLowRank,
    LayerNorm,
    Linear,
    LowRank,
    LowRankMatrices,
    Ops,
    PackedParts,
    PackGatedLinear,
    PackLinear,
    Penalised,
)
from triptych_kernels.quantized import JoinedWeight, QuantizedWeight, Weight, as_tensor, join_rows
from triptych_kernels.reference import REFERENCE, uniform_noise
from triptych_kernels.state_batch import StateBatch

__all__ = [
    "LARGE_PAGE_BYTES", "REFERENCE", "SUMS_VERSION", "AttentionBatch", "DenseLayer", "EncoderLayer",
    "ExpertBiases", "Experts", "FusedEncoder", "FusedLayers", "JoinedWeight", "LayerLowRank", "LayerNorm",
    "Linear", "LowRank", "LowRankMatrices", "Ops", "PackGatedLinear", "PackLinear", "PackedParts",
    "Penalised", "QuantizedWeight", "StateBatch", "Weight", "as_tensor", "join_rows", "ops_for",
    "own_panels", "populate", "prefer_large_pages", "prefer_small_pages", "set_num_threads",
    "uniform_noise",
]  # fmt: skip


def ops_for(device: torch.device, *, deterministic: bool = False, cpu_isa: str = "auto") -> Ops:
    """The fastest ops that run on `device`; with `deterministic`, the fastest that are batch-invariant.

    On a CPU without native kernels these are the reference ops, which are not fully batch-invariant.
    cpu_isa: the widest instruction set of cpu.ISAS that a CPU's kernels use, or "auto". Results differ
    between instruction sets by rounding.
    """
    if device.type == "cuda":
        # Imported here: triton need not be installed where there is no GPU.
        from triptych_kernels.triton import triton_ops

        return triton_ops(deterministic=deterministic)
    return cpu.native_ops(cpu.ISAS[0] if cpu_isa == "auto" else cpu_isa) or REFERENCE


def set_num_threads(num_threads: int) -> None:
    """Number of compute threads of the native CPU kernels, including the caller's."""
    cpu.set_num_threads(num_threads)
