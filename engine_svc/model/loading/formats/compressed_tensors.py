"""compressed-tensors, as llm-compressor writes it: groups of modules, each with a scheme of its own.

Of a module, in the layout "pack-quantized": weight_packed [N, K / f] int32 with f = 32 / bits fields a word,
each larger by half of the range, weight_scale, weight_shape, weight_zero_point [N / f, G] packed along
outputs, weight_g_idx [K]. In the others: weight [N, K] int8 or float8_e4m3fn, weight_scale,
weight_zero_point. Scales of activations are not used: activations keep their dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.formats.stored import (
    SCALE_DTYPES,
    WORD_BITS,
    Blocks,
    Format,
    Section,
    Stored,
    checked_group_size,
    expect,
    expect_grid,
    expect_matrix,
    expect_no_plain_weight,
    modules_with,
    stated_names,
    supported_bits,
    whole_number,
)

if TYPE_CHECKING:
    from torch import Tensor

    from engine_svc.model.loading.weights import WeightSource
    from triptych_kernels import QuantizedWeight

_PACKED = "pack-quantized"
_UNPACKED = ("int-quantized", "float-quantized", "naive-quantized")
_BITS = (2, 4, 8)  # of packed codes
_PREFIX = "re:"
_UNUSED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
# Transforms and structures that the weights alone do not have.
_SECTIONS = ("transform_config", "moe_sparsity_config")


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How the weights of a group are stored."""

    layout: str
    bits: int
    is_float: bool
    is_symmetric: bool
    strategy: str
    group_size: int
    block_structure: tuple[int, int]
    has_order: bool

    def blocks(self, module: str, shape: tuple[int, int]) -> Blocks:
        """The part of a weight that shares a scale."""
        if self.strategy == "block":
            return Blocks(*self.block_structure)
        if self.strategy == "tensor":
            return Blocks(*shape)
        if self.strategy == "channel":
            return Blocks(1, shape[1])
        if shape[1] % self.group_size:
            raise CheckpointError(
                f"{module} has {shape[1]} inputs, group_size {self.group_size} does not divide them"
            )
        return Blocks(1, self.group_size)


@dataclass(frozen=True, slots=True)
class _Weight:
    module: str
    shape: tuple[int, int]
    scheme: _Scheme
    blocks: Blocks
    tensors: tuple[str, ...]

    def read(self, read: Callable[[str], Tensor]) -> QuantizedWeight:
        # Imported here: checks before a start do without torch.
        from engine_svc.model.loading.formats import unpacking

        scheme, num_rows = self.scheme, self.shape[0]
        grid = self.blocks.grid(self.shape)
        if scheme.layout == _PACKED:
            self._check_shape(read)
            bits, zero = scheme.bits, float(1 << (scheme.bits - 1))
            codes = unpacking.codes_of_words(read(self._name("weight_packed")), bits)
            values = unpacking.integers(bits, zero)
        elif scheme.is_float:
            name = self._name("weight")
            bits, (codes, values) = 8, unpacking.codes_of_fp8(name, read(name))
        else:
            bits, (codes, values) = 8, unpacking.codes_of_int8(read(self._name("weight")))
        scale = read(self._name("weight_scale"))
        zeros = None
        if (name := self._name("weight_zero_point")) in self.tensors:
            stored = read(name)
            if stored.element_size() > 1:
                packed = unpacking.codes_of_words(stored.t(), bits)[:, :num_rows].t()
                stored = packed.float() - (1 << (bits - 1))
            zeros = unpacking.by_rows(stored, grid, self.blocks.num_rows, num_rows)
        groups = None
        if (name := self._name("weight_g_idx")) in self.tensors:
            order = read(name)
            # All -1: without an order.
            if not (order == -1).all():
                groups = unpacking.groups_of(name, order, self.blocks.num_columns, grid[1])
        return unpacking.quantized(
            codes,
            bits,
            values,
            unpacking.by_rows(scale, grid, self.blocks.num_rows, num_rows),
            self.blocks.num_columns,
            scale.dtype,
            zeros=zeros,
            groups=groups,
        )

    def _name(self, part: str) -> str:
        return f"{self.module}.{part}"

    def _check_shape(self, read: Callable[[str], Tensor]) -> None:
        name = self._name("weight_shape")
        stated = tuple(read(name).tolist())
        if stated != self.shape:
            raise CheckpointError(f"{name} is {stated}, {self.module}.weight_packed has {self.shape}")


@dataclass(frozen=True, slots=True)
class _Targets:
    """Which scheme a module has: its name comes first, then patterns, then its class."""

    names: Mapping[str, _Scheme | None]  # of modules and classes; None: weights are in full
    patterns: Sequence[tuple[re.Pattern[str], _Scheme | None]]
    ignored_names: frozenset[str]
    ignored_patterns: Sequence[re.Pattern[str]]

    def scheme_of(self, module: str, tensor: str) -> _Scheme:
        if module in self.ignored_names or any(pattern.match(module) for pattern in self.ignored_patterns):
            raise CheckpointError(f"{module} has {tensor}, by ignore of quantization_config it is in full")
        if module in self.names:
            scheme = self.names[module]
        else:
            # Classes are not known here; linear layers and embeddings are all that is quantized.
            kind = "Embedding" if "embed" in module.rpartition(".")[2] else "Linear"
            matching = (scheme for pattern, scheme in self.patterns if pattern.match(module))
            scheme = next(matching, self.names.get(kind))
        if scheme is None:
            raise CheckpointError(f"{module} has {tensor}, no group of config_groups quantizes it")
        return scheme


def _targets(section: Section) -> _Targets:
    groups = section.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise CheckpointError(f"config_groups is {groups!r}, expected an object")
    schemes: dict[str, _Scheme | None] = {}
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise CheckpointError(f"{name} of config_groups is {group!r}, expected an object")
        schemes |= dict.fromkeys(stated_names(group, "targets"), _scheme(name, group, section))
    ignored = stated_names(section, "ignore")
    return _Targets(
        schemes,
        [(_compiled(target), schemes[target]) for target in sorted(schemes) if target.startswith(_PREFIX)],
        frozenset(ignored),
        [_compiled(name) for name in ignored if name.startswith(_PREFIX)],
    )


def _compiled(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix(_PREFIX))
    except re.error as error:
        raise CheckpointError(f"quantization_config has pattern {target!r}: {error}") from None


def _sources(section: Section, stored: Stored) -> dict[str, WeightSource]:
    for key in _SECTIONS:
        if section.get(key):
            raise UnsupportedModel(f"{key} is stated, which is not applied")
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise UnsupportedModel(f"the format of sparsity_config is {sparsity['format']}, which is not read")
    targets = _targets(section)
    packed = {
        module + ".weight": _packed(module, targets.scheme_of(module, "weight_packed"), stored)
        for module in modules_with(stored, ".weight_packed")
    }
    unpacked = {
        name: _unpacked(module, targets.scheme_of(module, f"weight in {entry.dtype}"), stored)
        for name, entry in stored.items()
        if entry.dtype in ("I8", "F8_E4M3") and (module := name.removesuffix(".weight")) != name
    }
    return {**packed, **unpacked}


def _scheme(name: str, group: Section, section: Section) -> _Scheme | None:
    layout = group.get("format") or section.get("format")
    weights = group.get("weights")
    if weights is None or layout == "dense":
        return None
    if layout not in (_PACKED, *_UNPACKED):
        read = ", ".join((_PACKED, *_UNPACKED))
        raise UnsupportedModel(f"the format of {name} is {layout}, compressed-tensors is read as {read}")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"weights of {name} is {weights!r}, expected an object")
    group_size = weights.get("group_size")
    size = -1 if group_size is None else checked_group_size(whole_number(weights, "group_size", within=name))
    strategy = weights.get("strategy") or (
        "tensor" if group_size is None else "channel" if size == -1 else "group"
    )
    if strategy not in ("tensor", "channel", "group", "block"):
        raise UnsupportedModel(
            f"the strategy of {name} is {strategy}, read are tensor, channel, group and block"
        )
    if strategy == "group" and size == -1:
        raise CheckpointError(f"the strategy of {name} is group, group_size is {group_size}")
    bits = whole_number({"num_bits": 8, **weights}, "num_bits", within=name)
    is_float = weights.get("type") == "float"
    supported_bits(bits, (8,) if layout != _PACKED else _BITS, layout, name=f"num_bits of {name}")
    if layout == _PACKED and is_float:
        raise UnsupportedModel(f"type of {name} is float, pack-quantized is read as int")
    return _Scheme(
        layout=layout,
        bits=bits,
        is_float=is_float,
        is_symmetric=weights.get("symmetric") is not False,
        strategy=strategy,
        group_size=size,
        block_structure=_block_structure(name, weights) if strategy == "block" else (1, 1),
        has_order=weights.get("actorder") in ("group", "dynamic", True),
    )


def _block_structure(name: str, weights: Section) -> tuple[int, int]:
    stated = weights.get("block_structure")
    numbers = stated.split("x") if isinstance(stated, str) else stated
    if isinstance(numbers, list) and len(numbers) == 2 and all(str(number).isdecimal() for number in numbers):
        num_rows, num_columns = map(int, numbers)
        if num_rows > 0 and num_columns > 0:
            return num_rows, num_columns
    raise CheckpointError(f"block_structure of {name} is {stated!r}, expected two whole numbers from 1 on")


def _packed(module: str, scheme: _Scheme, stored: Stored) -> _Weight:
    if scheme.layout != _PACKED:
        raise CheckpointError(f"{module} has weight_packed, the format of its group is {scheme.layout}")
    expect_no_plain_weight(stored, module, ".weight_packed")
    num_fields = WORD_BITS // scheme.bits
    num_rows, num_words = expect_matrix(stored, module + ".weight_packed", ("I32",))
    expect(stored, module + ".weight_shape", ("I32", "I64"), (2,))
    return _weight(
        module, (num_rows, num_words * num_fields), scheme, ["weight_packed", "weight_shape"], stored
    )


def _unpacked(module: str, scheme: _Scheme, stored: Stored) -> _Weight:
    if scheme.layout == _PACKED:
        raise CheckpointError(f"{module}.weight_packed is missing, the format of its group is {_PACKED}")
    shape = expect_matrix(stored, module + ".weight", ("F8_E4M3" if scheme.is_float else "I8",))
    return _weight(module, shape, scheme, ["weight"], stored)


def _weight(
    module: str, shape: tuple[int, int], scheme: _Scheme, parts: Iterable[str], stored: Stored
) -> _Weight:
    names = [f"{module}.{part}" for part in parts]
    blocks = scheme.blocks(module, shape)
    grid = blocks.grid(shape)
    names.append(expect_grid(stored, module + ".weight_scale", SCALE_DTYPES, grid).name)
    zero = module + ".weight_zero_point"
    if not scheme.is_symmetric or zero in stored:
        names.append(zero)
        if scheme.layout == _PACKED and scheme.strategy in ("group", "channel") and not scheme.is_symmetric:
            num_words = -(-shape[0] * scheme.bits // WORD_BITS)
            expect(stored, zero, ("I32",), (num_words, grid[1]))
        else:
            expect_grid(stored, zero, ("I8", "F8_E4M3"), grid)
    order = module + ".weight_g_idx"
    if scheme.has_order or order in stored:
        names.append(expect(stored, order, ("I32", "I64"), shape[1:]).name)
    names += [f"{module}.{part}" for part in _UNUSED if f"{module}.{part}" in stored]
    return _Weight(module, shape, scheme, blocks, tuple(names))


COMPRESSED_TENSORS = Format(
    "compressed-tensors",
    ("compressed-tensors",),
    "compressed-tensors (integers of 2, 4 or 8 bits, fp8)",
    _sources,
)
