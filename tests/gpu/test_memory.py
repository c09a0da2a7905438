"""What is free for the KV cache of a GPU: measured by a step, unless its size is configured."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine_svc.build.runner import free_memory
from engine_svc.config import EngineConfig

pytestmark = pytest.mark.gpu


@dataclass(frozen=True, slots=True)
class NoModel:
    """What is loaded, but for the model: no step can be run."""

    device: torch.device


@pytest.mark.parametrize("stated", [{"num_kv_blocks": 9}, {"kv_cache_memory": 1 << 20}])
def test_the_memory_for_a_cache_of_a_stated_size_is_looked_up_without_a_step(device, stated):
    free = free_memory(EngineConfig(model="any", **stated), NoModel(device))  # type: ignore[arg-type]
    assert 0 < free.num_bytes <= torch.cuda.mem_get_info()[1]
