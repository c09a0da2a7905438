"""Where the kernels run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.kernels.triton.interpreter import complete_interpreter

complete_interpreter()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU where there is one, else the CPU in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _quiet_arithmetic() -> Iterator[None]:
    """Infinities and NaN arise in silence, as on a GPU."""
    with np.errstate(all="ignore"):
        yield
