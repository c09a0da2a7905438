"""No op of the Triton table is without a test at three shapes or more."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from types import ModuleType

import pytest

from tests.kernels import triton as tests_of_kernels
from triptych_kernels import Ops

_MIN_SHAPES = 3
_FACTS = {"name", "is_batch_invariant", "needs_clean_blocks", "reads_common_blocks", "activations"}
# Other ops in a row, for which a recorded step needs no call; rows of weights of codes, which a GPU has not;
# what files keep of weights that take long to pack.
_OF_A_CPU = {"fuse_encoder", "fuse_layers", "look_up", "put_together", "take_apart"}
# The reference's own: it keeps matrices as they are.
_OF_THE_REFERENCE = {"pack_low_rank"}
OPS = sorted(
    field.name
    for field in dataclasses.fields(Ops)
    if field.name not in _FACTS | _OF_A_CPU | _OF_THE_REFERENCE
)


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_compared_with_its_reference_at_three_shapes(op):
    tests = [getattr(module, f"test_{op}_equals_the_reference", None) for module in _test_modules()]
    num_shapes = [len(_shapes(test)) for test in tests if test is not None]
    assert len(num_shapes) == 1
    assert num_shapes[0] >= _MIN_SHAPES


def _test_modules() -> list[ModuleType]:
    names = [module.name for module in pkgutil.iter_modules(tests_of_kernels.__path__)]
    return [
        importlib.import_module(f"{tests_of_kernels.__name__}.{name}")
        for name in names
        if name.startswith("test_") and name != "test_coverage"
    ]


def _shapes(test: object) -> set[str]:
    """The shapes of a test that is parametrized by `shape`, alone or together with others."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    shapes: set[str] = set()
    for mark in marks:
        names, values = mark.args[:2]
        if names == "shape":
            shapes.update(map(str, values))
        elif "shape" in names:
            shapes.update(str(value[names.index("shape")]) for value in values)
    return shapes
