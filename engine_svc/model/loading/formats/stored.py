"""What config.json and headers state of quantized weights, and how formats check it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.folder import HeaderEntry

if TYPE_CHECKING:
    from engine_svc.model.loading.weights import WeightSource

Section = Mapping[str, Any]  # quantization_config of a config.json
Stored = Mapping[str, HeaderEntry]  # tensors of the files, by name

SCALE_DTYPES = ("F32", "BF16", "F16")
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Format:
    """One format of quantized weights.

    sources: the weights that it makes of the tensors, by name. Raises CheckpointError for tensors that do not
    fit each other or the section, UnsupportedModel for variants that are not read.
    """

    name: str
    methods: tuple[str, ...]  # values of quant_method
    served: str  # variants, for people
    sources: Callable[[Section, Stored], dict[str, WeightSource]]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The part of a weight that shares a scale: so many neighbouring rows and columns."""

    num_rows: int
    num_columns: int

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The number of blocks over rows and columns of a weight; the last ones may be smaller."""
        return -(-shape[0] // self.num_rows), -(-shape[1] // self.num_columns)


def modules_with(stored: Stored, ending: str) -> list[str]:
    """Modules that have a tensor with this ending, such as ".qweight"."""
    return [name.removesuffix(ending) for name in stored if name.endswith(ending)]


def expect(
    stored: Stored, name: str, dtypes: Iterable[str], shape: tuple[int, ...] | None = None
) -> HeaderEntry:
    """The entry of a tensor that has to be there, with one of these dtypes and this shape (None: any)."""
    entry = stored.get(name)
    if entry is None:
        raise CheckpointError(f"{name} is missing")
    allowed = tuple(dtypes)
    if entry.dtype not in allowed:
        raise CheckpointError(f"{name} has dtype {entry.dtype}, expected {' or '.join(allowed)}")
    if shape is not None and entry.shape != shape:
        raise CheckpointError(f"{name} has shape {entry.shape}, expected {shape}")
    return entry


def expect_matrix(stored: Stored, name: str, dtypes: Iterable[str]) -> tuple[int, int]:
    """The shape of a tensor of two dimensions that has to be there, with one of these dtypes."""
    shape = expect(stored, name, dtypes).shape
    if len(shape) != 2 or not all(shape):
        raise CheckpointError(f"{name} has shape {shape}, expected a matrix")
    return shape[0], shape[1]


def fits(shape: tuple[int, ...], grid: tuple[int, int]) -> bool:
    """Whether a tensor has a number for each block: for one column also a vector, for one block a scalar."""
    return shape == grid or (grid[1] == 1 and shape == grid[:1]) or (grid == (1, 1) and shape == ())


def expect_grid(stored: Stored, name: str, dtypes: Iterable[str], grid: tuple[int, int]) -> HeaderEntry:
    """The entry of a tensor that has to be there, with a number for each block."""
    entry = expect(stored, name, dtypes)
    if not fits(entry.shape, grid):
        raise CheckpointError(f"{name} has shape {entry.shape}, expected {grid}")
    return entry


def expect_no_plain_weight(stored: Stored, module: str, ending: str) -> None:
    """Raise CheckpointError if the module has its weight in full beside the quantized one."""
    if module + ".weight" in stored:
        raise CheckpointError(f"{module} has both weight and {ending.removeprefix('.')}")


def whole_number(section: Section, name: str, *, within: str = "quantization_config") -> int:
    value = section.get(name)
    if type(value) is not int:
        raise CheckpointError(f"{name} of {within} is {value!r}, expected a whole number")
    return value


def supported_bits(value: int, allowed: tuple[int, ...], method: str, *, name: str = "bits") -> int:
    if value not in allowed:
        choices = ", ".join(map(str, allowed[:-1])) + (" or " if allowed[:-1] else "") + str(allowed[-1])
        raise UnsupportedModel(f"{name} is {value}, {method} is read with {choices}")
    return value


def checked_group_size(value: int) -> int:
    """-1 for all columns."""
    if value != -1 and value < 1:
        raise CheckpointError(f"group_size is {value}, expected -1 or at least 1")
    return value


def stated_names(section: Section, key: str) -> list[str]:
    """A list of names; empty where the section has none."""
    value = section.get(key)
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{key} of quantization_config is {value!r}, expected a list of names")
    return names
