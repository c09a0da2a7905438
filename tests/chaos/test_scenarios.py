"""Whatever strikes one process or one connection, no client sees it, and nothing is left behind."""

from __future__ import annotations

import pytest

from tests.chaos.scenarios import SCENARIOS, ids_of
from tests.chaos.scene import Scene, judge

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("scene", SCENARIOS, ids=ids_of, indirect=True)
async def test_no_client_notices(scene: Scene) -> None:
    problems = await judge(scene)
    assert not problems, "\n".join(problems)
