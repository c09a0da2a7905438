"""Copies of a checkpoint with its matrices in a format of quantized weights, or with the numbers of one.

Every weight is rounded to the nearest code, with scales by the largest one of its group. Tools that look at
texts keep more of a model: this compares formats, not tools.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.model.loading.loader import ignore_progress, open_weights

WEIGHTS = "model.safetensors"
_SECTION = "quantization_config"
_LARGEST_FP8 = 448.0
# From the lowest bits on, a word of AWQ has these outputs.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Rounding:
    """A format: what config.json states of it, and a weight [N, K] by what follows its module's name."""

    section: Mapping[str, Any]
    store: Callable[[Tensor], Tensors]


def int4(group_size: int = 128) -> Rounding:
    """compressed-tensors with codes of 4 bits around 0."""

    def store(weight: Tensor) -> Tensors:
        codes, scales = _around_zero(weight, 4, group_size)
        shape = torch.tensor(weight.shape)
        return {
            "weight_packed": _words(codes + 8, 4), "weight_scale": scales.bfloat16(), "weight_shape": shape
        }  # fmt: skip

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": True}
    return Rounding(_of_compressed_tensors("pack-quantized", weights), store)


def int8() -> Rounding:
    """compressed-tensors with codes of 8 bits and a scale for each output."""

    def store(weight: Tensor) -> Tensors:
        codes, scales = _around_zero(weight, 8, weight.shape[1])
        return {"weight": codes.to(torch.int8), "weight_scale": scales.bfloat16()}

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    return Rounding(_of_compressed_tensors("int-quantized", weights), store)


def gptq(group_size: int = 128) -> Rounding:
    def store(weight: Tensor) -> Tensors:
        codes, scales = _around_zero(weight, 4, group_size)
        # Zeros are stored less 1.
        zeros = torch.full((scales.shape[1], len(weight)), 7)
        return {
            "qweight": _words(codes + 8, 4).t(),
            "qzeros": _words(zeros, 4),
            "scales": scales.half().t(),
            "g_idx": (torch.arange(weight.shape[1]) // group_size).int(),
        }

    section = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": False, "sym": True}
    return Rounding(section, store)


def awq(group_size: int = 128) -> Rounding:
    """With a zero for each group."""

    def store(weight: Tensor) -> Tensors:
        groups = weight.unflatten(1, (-1, group_size))
        lowest, highest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = _stored_in((highest - lowest) / 15, torch.float16)
        zeros = (-lowest / scales).round().clamp(0, 15)
        codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15).flatten(1)

        def packed(numbers: Tensor) -> Tensor:
            return _words(numbers.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1), 4)

        return {"qweight": packed(codes.t()), "qzeros": packed(zeros.t()), "scales": scales.half().t()}

    section = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": True,
    }
    return Rounding(section, store)


def fp8(block: int = 128) -> Rounding:
    """With a scale for each square block."""

    def store(weight: Tensor) -> Tensors:
        num_rows, num_columns = (-(-size // block) for size in weight.shape)
        scales = torch.empty(num_rows, num_columns)
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for row in range(num_rows):
            for column in range(num_columns):
                part = (slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block))
                scales[row, column] = _stored_in(weight[part].abs().amax() / _LARGEST_FP8, torch.float32)
                codes[part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scales}

    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    return Rounding(section, store)


def write_quantized(source: Path, folder: Path, rounding: Rounding) -> Path:
    """A copy of a checkpoint of one file whose layers' projections are quantized; returns the folder."""
    tensors: Tensors = {}
    for name, weight in load_file(source / WEIGHTS).items():
        module = name.removesuffix(".weight")
        # Routers are small, and their choices matter.
        if weight.ndim == 2 and ".layers." in name and not module.endswith("gate"):
            stored = rounding.store(weight.float())
            tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in stored.items()}
        else:
            tensors[name] = weight
    return _write(source, folder, tensors, {_SECTION: dict(rounding.section)})


def write_dequantized(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint in any format, a GGUF's folder too, with its weights in full in fp32."""
    reader = open_weights(
        Checkpoint(source), ignore_progress, device=torch.device("cpu"), dtype=torch.float32
    )
    return _write(source, folder, {name: reader.read(name) for name in sorted(reader.names)}, {})


def _write(source: Path, folder: Path, tensors: Tensors, changes: Mapping[str, Any]) -> Path:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.gguf", "config.json"))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    content = json.loads((source / "config.json").read_text("utf-8"))
    content.pop(_SECTION, None)
    (folder / "config.json").write_text(json.dumps({**content, **changes}), "utf-8")
    return folder


def _of_compressed_tensors(layout: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head", r"re:.*\.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights}}},
    }


def _around_zero(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes [N, K] from -2 ** (bits - 1) on, and scales [N, G] as bf16 and fp16 have them."""
    groups = weight.unflatten(1, (-1, group_size))
    largest = 2 ** (bits - 1) - 1
    scales = _stored_in(groups.abs().amax(-1) / largest, torch.bfloat16)
    return (groups / scales[..., None]).round().clamp(-largest - 1, largest).flatten(1), scales


def _stored_in(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales rounded to a dtype; a group of zeros has one, too."""
    return torch.where(scales == 0, 1.0, scales).to(dtype).float()


def _words(numbers: Tensor, bits: int) -> Tensor:
    """[R, C * bits / 32] int32 of whole numbers [R, C], the first one in the lowest bits."""
    fields = numbers.numpy().astype(np.uint32).reshape(len(numbers), -1, 32 // bits)
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    return torch.from_numpy((fields << shifts).sum(-1, dtype=np.uint32).view(np.int32))
