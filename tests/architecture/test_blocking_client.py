"""The blocking client is written from the asyncio one."""

from __future__ import annotations

import pytest

from tools.blocking_client import FILES, FOLDER, blocking


@pytest.mark.parametrize("source", FILES)
def test_the_blocking_client_is_up_to_date(source: str) -> None:
    written = (FOLDER / FILES[source]).read_text()
    assert written == blocking(source), "run: python -m tools.blocking_client"
