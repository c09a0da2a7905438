"""Docstrings, names of files, and words that do not belong."""

from __future__ import annotations

import ast
import re

from tests.architecture.sources import all_sources, package_sources

FEATURE_NAMES = re.compile(r"lora|adapter|grammar|image|connector|continuum", re.IGNORECASE)
CORE = ("engine_svc/scheduler", "engine_svc/cache", "engine_svc/runner", "engine_svc/loop/engine.py")
FORBIDDEN_FILE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}
LEFT_OVER = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK|NOTE)\b")


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


def test_no_file_is_a_drawer() -> None:
    names = [(source.path, source.path.removesuffix(".py").split("/")) for source in all_sources()]
    assert [path for path, parts in names if FORBIDDEN_FILE_NAMES & set(parts)] == []


def test_nothing_is_left_for_later() -> None:
    hits = []
    for source in package_sources():
        lines = enumerate(source.text.splitlines(), start=1)
        hits += [f"{source.path}:{number}" for number, line in lines if LEFT_OVER.search(line)]
    assert hits == []
