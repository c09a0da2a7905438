"""Elementwise functions of torch whose bits do not depend on the elements beside.

On a CPU, torch computes the elements of a tensor that fill whole vectors otherwise than the rest, and divides
large tensors over threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements: twice what the widest vector of torch holds, or a multiple of that.
VECTOR_MULTIPLE = 64
# Elements: fewer than torch divides over threads.
_MAX_PIECE = 16_384


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each element of x, in whole vectors and in one thread. Returns x's shape."""
    flat = x.reshape(-1)
    whole = F.pad(flat, (0, -flat.numel() % VECTOR_MULTIPLE))
    pieces = [function(piece) for piece in whole.split(_MAX_PIECE)]
    result = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return result[: flat.numel()].view(x.shape)
