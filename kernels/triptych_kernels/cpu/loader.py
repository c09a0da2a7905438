"""Finds the compiled kernels, which may be missing without a compiler, or not run on an older CPU."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych_kernels.cpu._native import Kernels

logger = logging.getLogger(__name__)

ISAS = ("amx", "avx512", "avx2")
"""Instruction sets that there are kernels for, the widest first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set of this CPU, and the compiled kernels that use it."""

    name: str
    native: Kernels

    @property
    def with_amx(self) -> bool:
        """Whether bf16 is multiplied by the CPU's matrix unit, which rounds differently."""
        return self.name == "amx"


@functools.cache
def native_module() -> Any:
    """The compiled module, or None if it is missing or has no kernels for this CPU; logs the reason once."""
    try:
        from triptych_kernels.cpu import _native
    except ImportError as error:
        logger.warning(
            "native CPU kernels are missing: the slower reference runs", extra={"reason": str(error)}
        )
        return None
    if not _native.supports("avx2"):
        logger.warning(
            "native CPU kernels cannot run: the slower reference runs",
            extra={"reason": "they need AVX2 with FMA, which this CPU lacks"},
        )
        return None
    return _native


@functools.cache
def find_isa(widest: str) -> Isa | None:
    """The widest instruction set of ISAS, starting at `widest`, that this CPU and its system let kernels use.

    ValueError for another `widest`.
    """
    if widest not in ISAS:
        raise ValueError(f"the instruction set is {widest!r}, not one of {ISAS}")
    native = native_module()
    if native is None:
        return None
    for name in ISAS[ISAS.index(widest) :]:
        module = "avx512" if name == "amx" else name
        if native.supports(module) and (name != "amx" or can_use_amx(native)):
            return Isa(name, getattr(native, module))
    return None


def can_use_amx(native: Any) -> bool:
    """Whether this CPU has a matrix unit for bf16 and the system lets this process use it from now on.

    native: the compiled module.
    """
    error = native.request_amx()
    if error > 0:
        logger.warning(
            "AMX of this CPU is not used: slower kernels run, which round differently",
            extra={"reason": os.strerror(error)},
        )
    return error == 0
