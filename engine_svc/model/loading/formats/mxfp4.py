"""MXFP4, as gpt-oss stores its experts: numbers of four bits in blocks of 32 with a power of two each.

Of a projection of all experts: `_blocks` [E, N, K / 32, 16] with two codes a byte, the lower bits first, and
`_scales` [E, N, K / 32], exponents plus 127, both uint8.
Source: OCP Microscaling Formats (MX) v1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.formats.stored import Format, Section, Stored, expect, modules_with

if TYPE_CHECKING:
    from torch import Tensor

    from engine_svc.model.loading.weights import WeightSource
    from triptych_kernels import QuantizedWeight

_BLOCK_BYTES = 16
_BLOCK_SIZE = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))  # of codes


@dataclass(frozen=True, slots=True)
class _Mxfp4Experts:
    """All experts' weights, [E, K, N] as transformers has them."""

    name: str
    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.name + "_blocks", self.name + "_scales"

    def read_expert(self, index: int, read_rows: Callable[[str, int, int], Tensor]) -> QuantizedWeight:
        """See ExpertsSource."""
        # Imported here: checks before a start do without torch.
        import torch

        from triptych_kernels import QuantizedWeight

        packed, exponents = (read_rows(name, index, index + 1)[0] for name in self.tensors)
        # fp32 has exponents of the same bias, with 23 bits behind them; its 2 ** -127 is subnormal.
        bits = exponents.to(torch.int32) << 23
        scales = bits.where(exponents > 0, 1 << 22).view(torch.float32)
        return QuantizedWeight(
            codes=_codes(packed),
            bits=4,
            values=torch.tensor(_VALUES),
            scales=scales,
            group_size=_BLOCK_SIZE,
            dtype=torch.bfloat16,
        )

    def read(self, read: Callable[[str], Tensor]) -> Tensor:
        """In bfloat16, which has all of these numbers."""
        # Imported here: checks before a start do without torch.
        import torch

        blocks, scales = (read(name) for name in self.tensors)
        values = torch.tensor(_VALUES, dtype=torch.bfloat16)
        numbers = torch.empty(self.shape, dtype=torch.bfloat16)
        # One expert after the other: codes as indices take four times the memory of the numbers.
        for expert, packed in enumerate(blocks):
            codes = _codes(packed).unflatten(1, (-1, _BLOCK_SIZE))
            # bfloat16 has exponents of the same bias, with 7 bits behind them; its 2 ** -127 is subnormal.
            exponents = scales[expert].to(torch.int16)
            factors = (exponents << 7).where(exponents > 0, 1 << 6).view(torch.bfloat16)
            numbers[expert] = (values[codes.int()] * factors.unsqueeze(-1)).flatten(-2).t()
        return numbers


def _codes(packed: Tensor) -> Tensor:
    """[N, K] uint8 of blocks [N, K / 32, 16]."""
    import torch

    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(1)


def _sources(section: Section, stored: Stored) -> dict[str, WeightSource]:
    return {name: _experts(name, stored) for name in modules_with(stored, "_blocks")}


def _experts(name: str, stored: Stored) -> _Mxfp4Experts:
    shape = expect(stored, name + "_blocks", ("U8",)).shape
    if len(shape) != 4 or not all(shape) or shape[-1] != _BLOCK_BYTES:
        raise CheckpointError(
            f"{name}_blocks has shape {shape}, expected experts, outputs, blocks, {_BLOCK_BYTES} bytes"
        )
    expect(stored, name + "_scales", ("U8",), shape[:-1])
    if name in stored:
        raise CheckpointError(f"{name} is stored both in full and as {name}_blocks")
    return _Mxfp4Experts(name, (shape[0], shape[2] * _BLOCK_SIZE, shape[1]))


MXFP4 = Format("mxfp4", ("mxfp4",), "mxfp4 (experts of gpt-oss)", _sources)
