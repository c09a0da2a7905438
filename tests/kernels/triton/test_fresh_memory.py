"""Fresh memory is as the other tests need it."""

from __future__ import annotations

import torch

from tests.kernels.triton.fresh_memory import with_nan_memory


def test_fresh_memory_is_nan_within_the_call_alone(device):
    fresh = with_nan_memory(torch.empty, 1000, device=device)
    assert fresh.isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
