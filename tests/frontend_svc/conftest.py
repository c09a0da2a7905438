"""What every test of the frontend shares."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator

import pytest


@pytest.fixture(autouse=True)
async def servers_are_collected_in_their_loop() -> AsyncGenerator[None, None]:
    """grpc's server schedules its last step in its loop when it is collected, so that must not come later."""
    yield
    gc.collect()
