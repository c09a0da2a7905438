"""An installed package with a plugin, as a folder for PYTHONPATH."""

from __future__ import annotations

import sys
from pathlib import Path

from triptych_kit.plugins import GROUP


def write_plugin(folder: Path, name: str, source: str, *, group: str = GROUP) -> Path:
    """Install a package into `folder` whose plugin `name` is the function `start` of `source`."""
    module = f"plugin_{name}"
    _write_facts(folder, module, f"[{group}]\n{name} = {module}:start\n")
    (folder / f"{module}.py").write_text(source)
    return folder


def write_feature(folder: Path, name: str, **modules: str) -> Path:
    """Install a package into `folder` that is a feature of engines, by the sources of its modules."""
    package = f"feature_{name}"
    _write_facts(folder, package, f"[triptych.features]\n{name} = {package}\n")
    (folder / package).mkdir()
    for module, source in {"__init__": "", **modules}.items():
        (folder / package / f"{module}.py").write_text(source)
    return folder


def _write_facts(folder: Path, package: str, entry_points: str) -> None:
    facts = folder / f"{package}-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(entry_points)


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a process that finds what this one finds, and the packages in `folders`."""
    return ":".join([*map(str, folders), *(path for path in sys.path if path)])
