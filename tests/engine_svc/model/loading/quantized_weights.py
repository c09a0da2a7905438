"""Random weights as tools quantize and store them, with what they stand for, and folders of such weights."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Stored:
    """A weight as stored, by what follows the name of its module, and its numbers."""

    tensors: dict[str, Tensor]
    weight: Tensor


Store = Callable[[tuple[int, int], int], Stored]
"""Makes a random weight of a shape, by a seed."""


def _packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """[R, C * bits / 32] uint32 of numbers [R, C], the first one in the lowest bits."""
    fields = numbers.astype(np.uint32).reshape(len(numbers), -1, 32 // bits)
    return (fields << (np.arange(32 // bits, dtype=np.uint32) * bits)).sum(-1, dtype=np.uint32)


def _int32(words: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32))


def gptq(
    bits: int = 4,
    group_size: int = 32,
    *,
    version: int = 1,
    is_symmetric: bool = True,
    has_order: bool = False,
    dtype: Any = np.float32,
) -> Store:
    def store(shape: tuple[int, int], seed: int) -> Stored:
        rng, (num_rows, num_columns) = np.random.default_rng(seed), shape
        groups = np.arange(num_columns) // (num_columns if group_size == -1 else group_size)
        if has_order:
            groups = rng.permutation(groups)
        form = (groups.max() + 1, num_rows)
        codes = rng.integers(0, 1 << bits, (num_columns, num_rows))
        zeros = np.full(form, 1 << (bits - 1)) if is_symmetric else rng.integers(0, 1 << bits, form)
        scales = ((rng.random(form) + 0.5) * 0.6 / (1 << (bits - 1))).astype(dtype)
        qzeros = _packed(zeros, bits)
        if version == 1:
            qzeros -= np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        tensors = {
            "qweight": _int32(_packed(codes.T, bits).T),
            "qzeros": _int32(qzeros),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        numbers = (codes - zeros[groups]).astype(np.float32) * scales[groups].astype(np.float32)
        return Stored(tensors, torch.from_numpy(np.ascontiguousarray(numbers.T.astype(dtype))))

    return store


def awq(group_size: int = 32, *, dtype: Any = np.float32) -> Store:
    def store(shape: tuple[int, int], seed: int) -> Stored:
        rng, (num_rows, num_columns) = np.random.default_rng(seed), shape
        groups = np.arange(num_columns) // (num_columns if group_size == -1 else group_size)
        form = (groups.max() + 1, num_rows)
        codes, zeros = rng.integers(0, 16, (num_columns, num_rows)), rng.integers(0, 16, form)
        scales = ((rng.random(form) + 0.5) * 0.07).astype(dtype)

        def packed(numbers: np.ndarray) -> Tensor:
            return _int32(_packed(numbers.reshape(len(numbers), -1, 8)[..., _AWQ_ORDER], 4))

        tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": torch.from_numpy(scales)}
        numbers = (codes - zeros[groups]).astype(np.float32) * scales[groups].astype(np.float32)
        return Stored(tensors, torch.from_numpy(np.ascontiguousarray(numbers.T.astype(dtype))))

    return store


def compressed(layout: str, dtype: torch.dtype = torch.float32, **weights: object) -> Store:
    """Compressed and decompressed by compressed-tensors.  weights: those of a scheme."""

    def store(shape: tuple[int, int], seed: int) -> Stored:
        generator = torch.Generator().manual_seed(seed)
        args = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
        num_rows, num_columns = shape
        grid = {
            "tensor": (1,),
            "channel": (num_rows, 1),
            "group": (num_rows, num_columns // (args.group_size or num_columns)),
            "block": tuple(
                -(-size // block) for size, block in zip(shape, args.block_structure or shape, strict=True)
            ),
        }[str(args.strategy)]
        largest = 448.0 if args.type == "float" else float(1 << (args.num_bits - 1))
        scales = ((torch.rand(grid, generator=generator) + 0.5) * 0.6 / largest).to(dtype)
        state = {"weight": torch.randn(shape, generator=generator).to(dtype) * 0.3, "weight_scale": scales}
        if not args.symmetric:
            half = 1 << (args.num_bits - 1)
            state["weight_zero_point"] = torch.randint(
                -half, half, grid, generator=generator, dtype=torch.int8
            )
        compressor = BaseCompressor.get_value_from_registry(layout)
        tensors = compressor.compress(state, scheme)
        return Stored(tensors, compressor.decompress(tensors, scheme)["weight"])

    return store


def compressed_in_order(group_size: int = 32) -> Store:
    """In groups that columns have in another order, as compressed-tensors wrote it until version 0.18."""

    def store(shape: tuple[int, int], seed: int) -> Stored:
        plain = compressed(
            "pack-quantized", num_bits=4, strategy="group", group_size=group_size, symmetric=True
        )(shape, seed)
        groups = (torch.arange(shape[1]) // group_size)[
            torch.randperm(shape[1], generator=torch.Generator().manual_seed(seed))
        ]
        codes = unpack_from_int32(plain.tensors["weight_packed"], 4, torch.Size(shape))
        weight = codes.float() * plain.tensors["weight_scale"][:, groups]
        return Stored({**plain.tensors, "weight_g_idx": groups.int()}, weight)

    return store


def fp8(grid: str = "blocks", *, block: int = 128, dtype: torch.dtype = torch.float32) -> Store:
    """Dequantized by transformers.  grid: "tensor", "channel" or "blocks"."""

    def store(shape: tuple[int, int], seed: int) -> Stored:
        generator = torch.Generator().manual_seed(seed)
        form = {
            "tensor": (),
            "channel": (shape[0], 1),
            "blocks": tuple(-(-size // block) for size in shape),
        }[grid]
        weight = (torch.randn(shape, generator=generator) * 100).to(torch.float8_e4m3fn)
        scales = ((torch.rand(form, generator=generator) + 0.5) * 0.003).to(dtype)
        whole = torch.zeros(
            *(math.ceil(size / block) * block if grid == "blocks" else size for size in shape)
        )
        whole[: shape[0], : shape[1]] = weight.float()
        full = Fp8Dequantize(None)._dequantize_one(whole.to(torch.float8_e4m3fn), scales, dtype)
        name = "weight_scale_inv" if grid == "blocks" else "weight_scale"
        return Stored({"weight": weight, name: scales}, full[: shape[0], : shape[1]].contiguous())

    return store


def mxfp4(shape: tuple[int, int, int], seed: int, exponents: tuple[int, int] = (121, 126)) -> Stored:
    """Experts [E, K, N] as gpt-oss stores them, in full as transformers makes them of it."""
    generator, (num_experts, num_columns, num_rows) = torch.Generator().manual_seed(seed), shape
    form = (num_experts, num_rows, num_columns // 32)
    blocks = torch.randint(0, 256, (*form, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(*exponents, form, generator=generator, dtype=torch.uint8)
    return Stored(
        {"_blocks": blocks, "_scales": scales},
        convert_moe_packed_tensors(blocks, scales, dtype=torch.float32),
    )


def write_folder(
    source: Path,
    folder: Path,
    section: Mapping[str, Any],
    store: Callable[[str, tuple[int, ...], int], Stored | None],
) -> tuple[Path, Path]:
    """Two copies of a checkpoint, one with quantized weights in place of its own, one with their numbers.

    section: quantization_config.  store: makes the weight of a module, None: its own; given its name, shape
    and a seed.
    """
    quantized, full = folder / "quantized", folder / "full"
    for copy in (quantized, full):
        shutil.copytree(source, copy)
    weights = load_file(source / "model.safetensors")
    narrow: dict[str, Tensor] = {}
    for seed, (name, tensor) in enumerate(sorted(weights.items())):
        module = name.removesuffix(".weight")
        made = store(module, tuple(tensor.shape), seed) if tensor.ndim > 1 else None
        if made is None:
            narrow[name] = tensor
            continue
        dot = "" if module == name else "."
        narrow |= {module + dot + part: tensor.contiguous() for part, tensor in made.tensors.items()}
        weights[name] = made.weight.float().contiguous()
    assert set(narrow) - set(weights), "nothing was quantized"
    save_file(narrow, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, full / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((source / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**content, "quantization_config": section}))
    return quantized, full
