"""Copies between host and device that do not block. Knows no meaning of what it copies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Rows, positions and the like, on the host.
Ints = npt.NDArray[np.int64]


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """`array` on the device, contiguous. On a CPU memory is shared, so it must not be written any more."""
    # Selected columns of a table keep the table's strides; a kernel would read them with gaps.
    return send(torch.from_numpy(np.ascontiguousarray(array)), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device like `to_device`, for types that numpy does not have."""
    if device.type == "cpu":
        return tensor
    # Only a copy from pinned memory is ordered on the stream without the host waiting for it. The allocator
    # reserves the pages until the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """`tensor` on the host, to be read once the device has done all work launched before."""
    if tensor.device.type == "cpu":
        return tensor
    # torch copies to pinned memory in this case.
    return tensor.to("cpu", non_blocking=True)
