"""Which errors of a step are the device's. Knows no plan."""

from __future__ import annotations

from typing import NoReturn

import torch

from engine_svc.core.errors import DeviceFull, DeviceLost, PeersLost

# PyTorch has no types for these.
_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_DEVICE_LOST_TEXTS = ("CUDA error", "Triton Error [CUDA]", "CUDNN_STATUS_")


def raise_translated(error: RuntimeError | MemoryError) -> NoReturn:
    """Raise what `translated` makes of `error`, which is being handled."""
    translated_error = translated(error)
    try:
        if translated_error is error:
            # Not from itself: an error that is its own cause is a cycle.
            raise error
        raise translated_error from error
    finally:
        # This frame is in the traceback of what it raises, and so is all that the step had computed: a cycle
        # through a local would keep that until a full collection, and in an engine there may never be one.
        del translated_error, error


def translated(error: RuntimeError | MemoryError) -> Exception:
    """The error to raise instead of `error`: what the device is at fault for as DeviceFull or DeviceLost.

    After most errors of CUDA every later call fails as well, so all of them are taken for the end.
    """
    if isinstance(error, PeersLost):
        # Its text may be that of another machine's error.
        return error
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _contains_any(text, _OUT_OF_MEMORY_TEXTS):
        return DeviceFull(text or "out of memory")
    if isinstance(error, torch.AcceleratorError) or _contains_any(text, _DEVICE_LOST_TEXTS):
        return DeviceLost(text)
    return error


def _contains_any(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text for word in words)
