"""An installed package with a plugin, as a folder for PYTHONPATH."""

from __future__ import annotations

import sys
from pathlib import Path

from service_kit.plugins import GROUP


def write_plugin(folder: Path, name: str, source: str, *, group: str = GROUP) -> Path:
    """Install a package into `folder` whose plugin `name` is the function `start` of `source`."""
    module = f"plugin_{name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    facts = folder / f"{module}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:start\n")
    return folder


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a process that finds what this one finds, and the packages in `folders`."""
    return ":".join([*map(str, folders), *(path for path in sys.path if path)])
