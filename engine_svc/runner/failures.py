"""Which errors of a step are the device's. Knows no plan."""

from __future__ import annotations

import torch

from engine_svc.device_errors import DeviceFull, DeviceLost, PeersLost

# PyTorch has no types for these.
_SAYS_FULL = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_SAYS_LOST = ("CUDA error", "Triton Error [CUDA]", "CUDNN_STATUS_")


def translated(error: RuntimeError | MemoryError) -> Exception:
    """The error to raise instead of `error`: what the device is at fault for as DeviceFull or DeviceLost.

    After most errors of CUDA every later call fails as well, so all of them are taken for the end.
    """
    if isinstance(error, PeersLost):
        # Its text may be that of another machine's error.
        return error
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _says(text, _SAYS_FULL):
        return DeviceFull(text or "out of memory")
    if isinstance(error, torch.AcceleratorError) or _says(text, _SAYS_LOST):
        return DeviceLost(text)
    return error


def _says(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text for word in words)
