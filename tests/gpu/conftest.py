"""The device, and tiny models on it, each made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engine_svc.model.checkpoints import make_checkpoint
from tests.gpu.rig import GpuModel, load_on


@pytest.fixture(scope="session")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def gpu_model(
    device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, bool], GpuModel]:
    """Loads a family with an implementation, deterministic or not."""
    made: dict[tuple[str, str, bool], GpuModel] = {}

    def get(family: str, model_impl: str, is_deterministic: bool = False) -> GpuModel:
        key = (family, model_impl, is_deterministic)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{model_impl}")
            theirs = make_checkpoint(family, folder)
            made[key] = GpuModel(theirs, load_on(device, folder, model_impl, is_deterministic))
        return made[key]

    return get
