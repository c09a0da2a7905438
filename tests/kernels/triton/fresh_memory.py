"""Calls of ops whose outputs begin as NaN, so that what they leave unwritten shows."""

from __future__ import annotations

from collections.abc import Callable

import torch


def with_nan_memory(op: Callable, *args: object, **options: object):
    """op(*args, **options) with fresh memory full of NaN, and that of integers full of their largest."""
    torch.use_deterministic_algorithms(True)
    try:
        return op(*args, **options)
    finally:
        torch.use_deterministic_algorithms(False)
