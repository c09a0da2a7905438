"""A file holds one idea, a function fits on a screen."""

from __future__ import annotations

import ast

from tests.architecture.sources import all_sources

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_KERNEL_LINES = 120
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {source.path: source.text.count("\n") for source in all_sources()}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_70_lines() -> None:
    too_long = {}
    for source in all_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > (MAX_KERNEL_LINES if _is_kernel(node) else MAX_FUNCTION_LINES):
                    too_long[f"{source.path}:{node.lineno} {node.name}"] = length
    assert too_long == {}


def test_no_file_is_a_drawer() -> None:
    names = [(source.path, source.path.removesuffix(".py").split("/")) for source in all_sources()]
    assert [path for path, parts in names if FORBIDDEN_NAMES & set(parts)] == []


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
