"""Copies of the tree without one feature of the engine, and what has to work in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.architecture.sources import ROOT

_COPIED = ("engine_svc", "tests")
_LINKED = (
    "service_kit",
    "kernels",
    "protos",
    "frontend_svc",
    "coordinator_svc",
    "launcher",
    "triptych_client",
)
_IMPORT_ALL = """
import importlib, pkgutil, engine_svc
for module in pkgutil.walk_packages(engine_svc.__path__, "engine_svc."):
    importlib.import_module(module.name)
"""


def check_without(feature: str, folder: Path, *, tests: Sequence[str]) -> None:
    """Without `feature` everything imports, the import contracts hold, and `tests` pass."""
    make_tree(feature, folder)
    run(folder, sys.executable, "-c", _IMPORT_ALL)
    run(folder, str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    run(folder, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)


def make_tree(feature: str, folder: Path) -> None:
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _LINKED:
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.rmtree(folder / "engine_svc" / "features" / feature)
    tests = folder / "tests" / "engine_svc" / "features" / feature
    if tests.is_dir():
        shutil.rmtree(tests)
    listing = folder / "engine_svc" / "features" / "__init__.py"
    text, num_lines = re.subn(rf'^    "{feature}",\n', "", listing.read_text(), flags=re.MULTILINE)
    assert num_lines == 1, f"the list has one line for {feature}"
    listing.write_text(text)


def run(folder: Path, *command: str) -> None:
    path = os.pathsep.join(str(folder / name) for name in (".", "protos", "kernels"))
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(command[:3])}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
