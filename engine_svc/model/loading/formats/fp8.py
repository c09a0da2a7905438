"""Weights in float8_e4m3fn with a scale for the tensor, each output channel, or blocks such as 128 x 128.

Of a module: weight [N, K], and weight_scale_inv or weight_scale, by which the weight is multiplied. Scales of
activations are not used: activations keep their dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.formats.stored import (
    SCALE_DTYPES,
    Blocks,
    Format,
    Section,
    Stored,
    expect,
    expect_matrix,
    fits,
)

if TYPE_CHECKING:
    from torch import Tensor

    from engine_svc.model.loading.weights import WeightSource
    from triptych_kernels import QuantizedWeight

_SCALES = (".weight_scale_inv", ".weight_scale")
_OF_ACTIVATIONS = (".input_scale", ".activation_scale", ".input_scale_ub")


@dataclass(frozen=True, slots=True)
class _Fp8Weight:
    weight: str
    scale: str
    shape: tuple[int, int]
    blocks: Blocks
    tensors: tuple[str, ...]

    def read(self, read: Callable[[str], Tensor]) -> QuantizedWeight:
        # Imported here: checks before a start do without torch.
        from engine_svc.model.loading.formats import unpacking

        codes, values = unpacking.codes_of_fp8(self.weight, read(self.weight))
        scale, grid = read(self.scale), self.blocks.grid(self.shape)
        scales = unpacking.by_rows(scale, grid, self.blocks.num_rows, self.shape[0])
        return unpacking.quantized(codes, 8, values, scales, self.blocks.num_columns, scale.dtype)


def _sources(section: Section, stored: Stored) -> dict[str, WeightSource]:
    kind = section.get("fmt")
    if kind not in (None, "e4m3"):
        raise UnsupportedModel(f"fmt is {kind}, fp8 is read as e4m3")
    block_size = _block_size(section)
    return {
        name: _weight(name.removesuffix(".weight"), block_size, stored)
        for name, entry in stored.items()
        if name.endswith(".weight") and entry.dtype == "F8_E4M3"
    }


def _block_size(section: Section) -> Blocks | None:
    stated = section.get("weight_block_size")
    if stated is None:
        return None
    if not isinstance(stated, list) or len(stated) != 2 or not all(type(n) is int and n > 0 for n in stated):
        raise CheckpointError(f"weight_block_size is {stated!r}, expected two whole numbers from 1 on")
    return Blocks(*stated)


def _weight(module: str, block_size: Blocks | None, stored: Stored) -> _Fp8Weight:
    num_rows, num_columns = shape = expect_matrix(stored, module + ".weight", ("F8_E4M3",))
    scale = next((module + ending for ending in _SCALES if module + ending in stored), None)
    if scale is None:
        raise CheckpointError(f"{module}.weight_scale_inv is missing, {module}.weight has dtype F8_E4M3")
    expect(stored, scale, SCALE_DTYPES)
    kinds = [Blocks(num_rows, num_columns), Blocks(1, num_columns)]
    if block_size is not None:
        kinds.insert(0, block_size)
    blocks = next((each for each in kinds if fits(stored[scale].shape, each.grid(shape))), None)
    if blocks is None:
        grids = " or ".join(str(each.grid(shape)) for each in kinds)
        raise CheckpointError(f"{scale} has shape {stored[scale].shape}, expected {grids}")
    others = (module + ending for ending in _OF_ACTIVATIONS if module + ending in stored)
    return _Fp8Weight(module + ".weight", scale, shape, blocks, (module + ".weight", scale, *others))


FP8 = Format("fp8", ("fp8", "fbgemm_fp8"), "fp8 (e4m3 by tensor, channel or block)", _sources)
