"""The project's own Python files, parsed once; generated code left out."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Folders whose public names people import; tests, examples and benchmarks are held to the sizes alone.
PACKAGES = (
    "triptych_kit",
    "coordinator_svc",
    "frontend_svc",
    "engine_svc",
    "triptych_client",
    "triptych_cli",
    "triptych_conformance",
    "kernels/triptych_kernels",
)
OTHERS = ("tests", "benchmarks", "examples", "tools")


@dataclass(frozen=True, slots=True)
class Source:
    """One file: where it is, below the root, and what is in it."""

    path: str
    text: str
    tree: ast.Module

    def is_in(self, *places: str) -> bool:
        """True for a file of one of these folders, or one of these files."""
        return any(self.path == place or self.path.startswith(place + "/") for place in places)


@functools.cache
def all_sources() -> tuple[Source, ...]:
    """Every file of ours."""
    files = [file for folder in (*PACKAGES, *OTHERS) for file in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(_source(file) for file in files if not _is_foreign(file))


@functools.cache
def package_sources() -> tuple[Source, ...]:
    """The files that are installed."""
    return tuple(source for source in all_sources() if source.is_in(*PACKAGES))


def _source(file: Path) -> Source:
    text = file.read_text(encoding="utf-8")
    return Source(file.relative_to(ROOT).as_posix(), text, ast.parse(text))


def _is_foreign(file: Path) -> bool:
    return "_pb2" in file.name or "node_modules" in file.parts
