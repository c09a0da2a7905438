"""Copies between host and device that nobody waits for. Knows no meaning of what it copies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """`array` on the device, contiguous. On a CPU it is shared, so it must not be written any more."""
    # Picking columns of a table leaves them in the table's order, which a kernel would read across.
    return send(torch.from_numpy(np.ascontiguousarray(array)), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """As `to_device`, for types that numpy does not have."""
    if device.type == "cpu":
        return tensor
    # Only from pinned memory is a copy ordered on the stream without the host waiting for it; the pages stay
    # reserved until it is done.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """`tensor` on the host, to be read once the device has done what it was given so far."""
    return tensor.to("cpu", non_blocking=True)
