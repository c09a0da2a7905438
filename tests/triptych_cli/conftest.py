"""Supervised processes that end with their test, and engines that are guarded against other threads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.one_owner import guarded_engines, one_owner
from tests.triptych_cli.serve.supervised import MakeStack, Stack

__all__ = ["guarded_engines", "make_stack", "one_owner"]


@pytest.fixture
async def make_stack(tmp_path: Path) -> AsyncIterator[MakeStack]:
    made: list[Stack] = []

    def make(*arguments: Any, **options: Any) -> Stack:
        made.append(Stack(tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for one in made:
        await one.close()
