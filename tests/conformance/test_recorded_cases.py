"""The scheduler decides as recorded: order, tokens, blocks by id, drafts, queues, outputs, at every step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.replay import first_difference, read_case

CASES = sorted((Path(__file__).parent / "cases").glob("*.json.gz"))


def test_cases_of_all_families_are_there():
    assert {path.name[0] for path in CASES} == set("abcdefghijklm")
    assert len(CASES) > 120


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_the_scheduler_decides_as_recorded(path: Path):
    assert first_difference(read_case(path)) is None
