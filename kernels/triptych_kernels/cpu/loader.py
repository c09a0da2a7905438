"""Finds the compiled kernels, which an installation without a compiler lacks and an older CPU cannot run."""

from __future__ import annotations

import functools
import logging
import os

logger = logging.getLogger(__name__)


@functools.cache
def can_run_native() -> bool:
    """Whether the compiled kernels are here and this CPU runs them; logs once why they do not."""
    try:
        from triptych_kernels.cpu import _native
    except ImportError as error:
        logger.warning(
            "native CPU kernels are missing: the slower reference runs", extra={"reason": str(error)}
        )
        return False
    if not _native.is_supported():
        logger.warning(
            "native CPU kernels cannot run: the slower reference runs",
            extra={"reason": "they need AVX-512 with VBMI and BF16, which this CPU lacks"},
        )
        return False
    return True


def can_use_amx() -> bool:
    """Whether this CPU has a matrix unit for bf16 and the system lets this process use it from now on."""
    from triptych_kernels.cpu import _native

    error = _native.request_amx()
    if error > 0:
        logger.warning(
            "AMX of this CPU is not used: slower kernels run, which round differently",
            extra={"reason": os.strerror(error)},
        )
    return error == 0
