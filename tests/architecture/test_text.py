"""What every public thing says of itself, and words that do not belong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.sources import Source, all_sources, package_sources

FEATURE_NAMES = re.compile(r"lora|adapter|grammar|image|connector|continuum", re.IGNORECASE)
CORE = ("engine_svc/scheduler", "engine_svc/cache", "engine_svc/runner", "engine_svc/engine.py")
LEFT_OVER = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK|NOTE)\b")


def test_every_public_thing_has_a_docstring() -> None:
    missing = [f"{source.path} {name}" for source in package_sources() for name in _undocumented(source)]
    assert missing == []


def test_docstrings_begin_with_a_sentence() -> None:
    bad = []
    for source in package_sources():
        first = (ast.get_docstring(source.tree) or "").partition("\n\n")[0]
        if not re.search(r"[.!?:]$", first.strip()):
            bad.append(source.path)
    assert bad == []


def test_the_core_knows_no_feature() -> None:
    hits = []
    for source in all_sources():
        if source.is_in(*CORE):
            lines = enumerate(source.text.splitlines(), start=1)
            hits += [
                f"{source.path}:{number} {line.strip()}"
                for number, line in lines
                if FEATURE_NAMES.search(line)
            ]
    assert hits == []


def test_nothing_is_left_for_later() -> None:
    hits = []
    for source in package_sources():
        lines = enumerate(source.text.splitlines(), start=1)
        hits += [f"{source.path}:{number}" for number, line in lines if LEFT_OVER.search(line)]
    assert hits == []


def _undocumented(source: Source) -> Iterator[str]:
    if ast.get_docstring(source.tree) is None:
        yield "the module"
    yield from _undocumented_in(source.tree, "")


def _undocumented_in(parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for node in parent.body:
        if not isinstance(
            node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None and not _is_overload_or_setter(node):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _undocumented_in(node, f"{prefix}{node.name}.")


def _is_overload_or_setter(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(re.search(r"overload|\.setter$", ast.unparse(decorator)) for decorator in node.decorator_list)
