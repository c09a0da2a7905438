"""Supervised processes that end with their test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.serve.supervised import MakeStack, Stack


@pytest.fixture
async def make_stack(tmp_path: Path) -> AsyncIterator[MakeStack]:
    made: list[Stack] = []

    def make(*arguments: Any, **options: Any) -> Stack:
        made.append(Stack(tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for one in made:
        await one.close()
