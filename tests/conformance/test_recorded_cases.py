"""The scheduler decides as recorded: order, tokens, blocks by id, drafts, queues, outputs, at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.adapter import capabilities
from tests.conformance.replay import first_difference, read_case

PATHS = sorted((Path(__file__).parent / "cases").glob("*.json.gz"))
RECORDED = {path.name.removesuffix(".json.gz"): read_case(path) for path in PATHS}
# Those that need no feature which is not here yet.
CASES = {name: case for name, case in RECORDED.items() if set(case.get("needs", ())) <= set(capabilities())}


def test_cases_of_all_families_are_replayed():
    assert {name[0] for name in CASES} == set("abcdefghijklmnoprstuvw")
    assert len(CASES) > 150


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_scheduler_decides_as_recorded(case: dict[str, Any]):
    assert first_difference(case) is None
