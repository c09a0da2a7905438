"""A test starts processes through `tests/processes.py`, which ends them with it."""

from __future__ import annotations

import ast

from tests.architecture.sources import Source, all_sources

STARTERS = {"Popen", "create_subprocess_exec", "create_subprocess_shell"}


def test_no_test_starts_a_process_that_could_outlive_it() -> None:
    tests = [
        source for source in all_sources() if source.is_in("tests") and not source.is_in("tests/processes.py")
    ]
    assert [f"{source.path}:{line}" for source in tests for line in _starts(source)] == []


def _starts(source: Source) -> list[int]:
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute | ast.Name)
        and ast.unparse(call.func).split(".")[-1] in STARTERS
    ]
