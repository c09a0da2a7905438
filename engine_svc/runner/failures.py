"""Recognizes errors of a step that are the device's fault. Knows no plan."""

from __future__ import annotations

from typing import NoReturn

import torch

from engine_svc.core.errors import DeviceFull, DeviceLost, PeersLost

# PyTorch has no types for these.
_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_DEVICE_LOST_TEXTS = ("CUDA error", "Triton Error [CUDA]", "CUDNN_STATUS_")


def raise_translated(error: RuntimeError | MemoryError) -> NoReturn:
    """Raise `translated(error)`; `error` is being handled."""
    translated_error = translated(error)
    try:
        if translated_error is error:
            # Not from itself: an error that is its own cause is a cycle.
            raise error
        raise translated_error from error
    finally:
        # This frame is in the traceback of what it raises, and so is everything that the step had computed. A
        # local that refers to the error would keep that until a full collection, which an engine may never
        # do.
        del translated_error, error


def translated(error: RuntimeError | MemoryError) -> Exception:
    """The error to raise instead of `error`: DeviceFull or DeviceLost if the device is at fault.

    After most CUDA errors every later call fails as well, so all of them count as DeviceLost.
    """
    if isinstance(error, PeersLost):
        # Its text may contain the error text of another machine.
        return error
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _contains_any(text, _OUT_OF_MEMORY_TEXTS):
        return DeviceFull(text or "out of memory")
    if isinstance(error, torch.AcceleratorError) or _contains_any(text, _DEVICE_LOST_TEXTS):
        return DeviceLost(text)
    return error


def _contains_any(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text for word in words)
