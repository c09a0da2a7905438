"""Quantized tensors of GGUF files as QuantizedWeights: the layouts of their blocks. Knows no files.

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_svc.model.loading.gguf.file import TensorType
from triptych_kernels import QuantizedWeight

# What codes stand for; in MXFP4 doubled, so that they are whole.
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """What blocks [N, B, bytes] hold: codes [N, B, block], scales and minima [N, B, groups]."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Layout:
    bits: int
    values: tuple[int, ...]
    unpack: Callable[[Tensor], _Unpacked]


def quantized_weight(kind: TensorType, rows: Tensor) -> QuantizedWeight:
    """The weight that rows of blocks stand for, in fp32.  rows: [N, bytes of a row] uint8."""
    layout = _LAYOUTS[kind.name]
    blocks = rows.view(rows.shape[0], -1, kind.block_bytes)
    unpacked = layout.unpack(blocks)

    def joined(parts: Tensor) -> Tensor:
        return parts.reshape(rows.shape[0], -1)

    return QuantizedWeight(
        codes=joined(unpacked.codes),
        bits=layout.bits,
        values=torch.tensor(layout.values, dtype=torch.float32),
        scales=joined(unpacked.scales),
        group_size=kind.block_size // unpacked.scales.shape[-1],
        dtype=torch.float32,
        minima=None if unpacked.minima is None else joined(unpacked.minima),
    )


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 number at a byte of each block, in fp32: [N, B, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes as [..., 2 n] codes: the lower four bits of all, then the upper ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bit_planes(packed: Tensor, num_bits: int) -> Tensor:
    """[..., n] bytes as [..., 8 / num_bits, n]: the lowest bits of each first."""
    planes = [packed >> shift for shift in range(0, 8, num_bits)]
    return torch.stack(planes, dim=-2) & ((1 << num_bits) - 1)


def _q4_0(blocks: Tensor) -> _Unpacked:
    return _Unpacked(_nibbles(blocks[..., 2:]), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> _Unpacked:
    return _Unpacked(_nibbles(blocks[..., 4:]), _halves(blocks, 0), -_halves(blocks, 2))


def _q5_0(blocks: Tensor) -> _Unpacked:
    return _Unpacked(_with_fifth_bits(blocks[..., 6:], blocks[..., 2:6]), _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> _Unpacked:
    codes = _with_fifth_bits(blocks[..., 8:], blocks[..., 4:8])
    return _Unpacked(codes, _halves(blocks, 0), -_halves(blocks, 2))


def _with_fifth_bits(packed: Tensor, fifth: Tensor) -> Tensor:
    """fifth: [..., 4] bytes, a bit for each of 32 codes in order."""
    bits = _bit_planes(fifth, 1).transpose(-1, -2).flatten(-2)
    return _nibbles(packed) | bits << 4


def _q8_0(blocks: Tensor) -> _Unpacked:
    return _Unpacked(blocks[..., 2:], _halves(blocks, 0))


def _q4_k(blocks: Tensor) -> _Unpacked:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return _Unpacked(codes, *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> _Unpacked:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    return _Unpacked(low | _bit_planes(blocks[..., 16:48], 1).flatten(-2) << 4, *_k_scales(blocks))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of 8 groups, [N, B, 8]: 12 bytes have six bits of each."""
    scales, minima, upper = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    of_scales = torch.cat([scales & 63, upper & 15 | scales >> 6 << 4], dim=-1)
    of_minima = torch.cat([minima & 63, upper >> 4 | minima >> 6 << 4], dim=-1)
    return _halves(blocks, 0) * of_scales.float(), _halves(blocks, 2) * of_minima.float()


def _q6_k(blocks: Tensor) -> _Unpacked:
    # Twice 128 codes: four bits from 64 bytes, two from 32.
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    high = _bit_planes(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-2)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return _Unpacked((low | high << 4).flatten(-2), _halves(blocks, 208) * scales)


def _mxfp4(blocks: Tensor) -> _Unpacked:
    # A scale is 2 ** (exponent - 127), half of that here, as the values are doubled. The first two of these
    # are subnormal.
    exponents = blocks[..., :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), exponents - 1 << 23)
    return _Unpacked(_nibbles(blocks[..., 1:]), bits.view(torch.float32))


_LAYOUTS = {
    "Q4_0": _Layout(4, tuple(range(-8, 8)), _q4_0),
    "Q4_1": _Layout(4, tuple(range(16)), _q4_1),
    "Q5_0": _Layout(5, tuple(range(-16, 16)), _q5_0),
    "Q5_1": _Layout(5, tuple(range(32)), _q5_1),
    # Codes are the bytes of signed numbers.
    "Q8_0": _Layout(8, (*range(128), *range(-128, 0)), _q8_0),
    "Q4_K": _Layout(4, tuple(range(16)), _q4_k),
    "Q5_K": _Layout(5, tuple(range(32)), _q5_k),
    "Q6_K": _Layout(6, tuple(range(-32, 32)), _q6_k),
    "IQ4_NL": _Layout(4, _IQ4_NL, _q4_0),
    "MXFP4": _Layout(4, _MXFP4, _mxfp4),
}
