"""AWQ in the layout "gemm": codes and zeros packed along outputs, eight a word in an order of their own.

Of a module: qweight [K, N / 8] and qzeros [G, N / 8] int32, scales [G, N].
"""

from __future__ import annotations

from collections.abc import Callable
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

_BITS = 4
_NUM_FIELDS = WORD_BITS // _BITS
# From the lowest bits on, a word has outputs 0 2 4 6 1 3 5 7. The field of each output:
_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class _AwqWeight:
    module: str
    shape: tuple[int, int]
    group_size: int
    tensors: tuple[str, ...]

    def read(self, read: Callable[[str], Tensor]) -> QuantizedWeight:
        # Imported here: checks before a start do without torch.
        from engine_svc.model.loading.formats import unpacking

        scales = read(self.module + ".scales")
        return unpacking.quantized(
            self._outputs(read(self.module + ".qweight")),
            _BITS,
            unpacking.integers(_BITS),
            scales.float().t().contiguous(),
            self.group_size,
            scales.dtype,
            zeros=self._outputs(read(self.module + ".qzeros")).float(),
        )

    def _outputs(self, words: Tensor) -> Tensor:
        """[N, R] uint8 of words [R, N / 8]."""
        from engine_svc.model.loading.formats import unpacking

        fields = unpacking.codes_of_words(words, _BITS).view(len(words), -1, _NUM_FIELDS)
        return fields[..., list(_FIELDS)].flatten(1).t().contiguous()


def _sources(section: Section, stored: Stored) -> dict[str, WeightSource]:
    layout = section.get("version") or section.get("checkpoint_format") or section.get("format") or "gemm"
    if not isinstance(layout, str) or layout.lower() != "gemm":
        raise UnsupportedModel(f"version is {layout}, awq is read as gemm")
    supported_bits(whole_number(section, "bits" if "bits" in section else "w_bit"), (_BITS,), "awq")
    group_size = checked_group_size(
        whole_number(section, "group_size" if "group_size" in section else "q_group_size")
    )
    return {
        module + ".weight": _weight(module, group_size, stored) for module in modules_with(stored, ".qweight")
    }


def _weight(module: str, group_size: int, stored: Stored) -> _AwqWeight:
    expect_no_plain_weight(stored, module, ".qweight")
    num_columns, num_words = expect_matrix(stored, module + ".qweight", ("I32",))
    num_rows = num_words * _NUM_FIELDS
    group_size = num_columns if group_size == -1 else group_size
    if num_columns % group_size:
        raise CheckpointError(
            f"{module} has {num_columns} inputs, group_size {group_size} does not divide them"
        )
    num_groups = num_columns // group_size
    expect(stored, module + ".scales", SCALE_DTYPES, (num_groups, num_rows))
    expect(stored, module + ".qzeros", ("I32",), (num_groups, num_words))
    names = tuple(f"{module}.{name}" for name in ("qweight", "qzeros", "scales"))
    return _AwqWeight(module, (num_rows, num_columns), group_size, names)


AWQ = Format("awq", ("awq",), "awq (4 bits, gemm)", _sources)
