"""The stacks that all scenarios of a session share, and scenarios played in fixtures.

A fault that does not strike is an error of the test, not a failure: it is raised before the test begins.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.scene import Scene, play
from tests.chaos.stacks import Stacks


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stacks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stacks]:
    stacks = Stacks(tmp_path_factory.mktemp("chaos"))
    yield stacks
    await stacks.drop()


@pytest_asyncio.fixture(loop_scope="session")
async def scene(request: pytest.FixtureRequest, stacks: Stacks) -> Scene:
    """A scenario that has been played to its end."""
    return await play(stacks, request.param)
