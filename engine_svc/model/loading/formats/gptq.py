"""GPTQ, as AutoGPTQ and GPTQModel write it: codes packed along inputs, zeros along outputs.

Of a module: qweight [K / f, N] and qzeros [G, N / f] int32 with f = 32 / bits fields a word, scales [G, N],
g_idx [K], the group of each input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.formats.stored import (
    SCALE_DTYPES,
    WORD_BITS,
    Format,
    Section,
    Stored,
    checked_group_size,
    expect,
    expect_matrix,
    expect_no_plain_weight,
    modules_with,
    supported_bits,
    whole_number,
)

if TYPE_CHECKING:
    from torch import Tensor

    from engine_svc.model.loading.weights import WeightSource
    from triptych_kernels import QuantizedWeight

_BITS = (2, 4, 8)
# Whether stored zeros are less by 1.
_LAYOUTS = {"gptq": True, "gptq_v2": False}


@dataclass(frozen=True, slots=True)
class _Scheme:
    bits: int
    group_size: int  # -1: all inputs
    orders: bool  # by g_idx


@dataclass(frozen=True, slots=True)
class _GptqWeight:
    module: str
    shape: tuple[int, int]
    bits: int
    group_size: int
    has_smaller_zeros: bool
    tensors: tuple[str, ...]

    def read(self, read: Callable[[str], Tensor]) -> QuantizedWeight:
        # Imported here: checks before a start do without torch.
        from engine_svc.model.loading.formats import unpacking

        codes = unpacking.codes_of_words(read(self.module + ".qweight").t(), self.bits)
        words = read(self.module + ".qzeros")
        if self.has_smaller_zeros:
            # All at once, with carries: GPTQModel subtracts so, and a zero of 0 borrows from its neighbour.
            words = unpacking.with_ones_added(words, self.bits)
        scales = read(self.module + ".scales")
        groups = None
        if (name := self.module + ".g_idx") in self.tensors:
            groups = unpacking.groups_of(name, read(name), self.group_size, len(scales))
        return unpacking.quantized(
            codes,
            self.bits,
            unpacking.integers(self.bits),
            scales.float().t().contiguous(),
            self.group_size,
            scales.dtype,
            zeros=unpacking.codes_of_words(words, self.bits).float().t().contiguous(),
            groups=groups,
        )


def _sources(section: Section, stored: Stored) -> dict[str, WeightSource]:
    layout = section.get("checkpoint_format") or section.get("format") or "gptq"
    if section.get("is_marlin_format") or not isinstance(layout, str) or layout not in _LAYOUTS:
        stated = "marlin" if section.get("is_marlin_format") else layout
        raise UnsupportedModel(f"checkpoint_format is {stated}, gptq is read as {' or '.join(_LAYOUTS)}")
    _scheme(section)  # Broken numbers are refused even where all modules have others.
    return {
        module + ".weight": _weight(module, _scheme_of(module, section), _LAYOUTS[layout], stored)
        for module in modules_with(stored, ".qweight")
    }


def _scheme(section: Section) -> _Scheme:
    bits = supported_bits(whole_number(section, "bits"), _BITS, "gptq")
    group_size = checked_group_size(whole_number(section, "group_size"))
    return _Scheme(bits, group_size, section.get("desc_act") is True)


def _scheme_of(module: str, section: Section) -> _Scheme:
    """The scheme of a module: the first pattern of `dynamic` that matches its name may have other numbers."""
    dynamic = section.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise CheckpointError(f"dynamic of quantization_config is {dynamic!r}, expected an object")
    for pattern, changes in dynamic.items():
        try:
            matches = re.match(pattern.removeprefix("-:").removeprefix("+:"), module)
        except re.error as error:
            raise CheckpointError(
                f"dynamic of quantization_config has pattern {pattern!r}: {error}"
            ) from None
        if matches and pattern.startswith("-:"):
            raise CheckpointError(f"{module} has qweight, by {pattern!r} of dynamic it is not quantized")
        if matches:
            if not isinstance(changes, Mapping):
                raise CheckpointError(f"{pattern!r} of dynamic is {changes!r}, expected an object")
            return _scheme({**section, **changes})
    return _scheme(section)


def _weight(module: str, scheme: _Scheme, has_smaller_zeros: bool, stored: Stored) -> _GptqWeight:
    expect_no_plain_weight(stored, module, ".qweight")
    num_fields = WORD_BITS // scheme.bits
    num_words, num_rows = expect_matrix(stored, module + ".qweight", ("I32",))
    num_columns = num_words * num_fields
    group_size = num_columns if scheme.group_size == -1 else scheme.group_size
    num_groups = -(-num_columns // group_size)
    expect(stored, module + ".scales", SCALE_DTYPES, (num_groups, num_rows))
    if num_rows % num_fields:
        raise CheckpointError(
            f"{module} has {num_rows} outputs, {scheme.bits} bits need a multiple of {num_fields}"
        )
    expect(stored, module + ".qzeros", ("I32",), (num_groups, num_rows // num_fields))
    names = ["qweight", "qzeros", "scales"]
    if scheme.orders or module + ".g_idx" in stored:
        expect(stored, module + ".g_idx", ("I32", "I64"), (num_columns,))
        names.append("g_idx")
    return _GptqWeight(
        module,
        (num_rows, num_columns),
        scheme.bits,
        group_size,
        has_smaller_zeros,
        tuple(f"{module}.{name}" for name in names),
    )


GPTQ = Format("gptq", ("gptq",), "gptq (2, 4 or 8 bits)", _sources)
