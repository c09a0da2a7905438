"""Environments with packages of PyPI, each for one test: uv makes them in a tenth of the time of pip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

UV = str(Path(sys.executable).with_name("uv"))
_LIMIT_S = 180


def environment_with(*packages: str, folder: Path) -> Path:
    """The interpreter of an environment with these packages alone.

    packages: options of `uv pip install` may be among them.
    """
    subprocess.run(
        [UV, "venv", "--quiet", "--python", sys.executable, folder],
        check=True,
        timeout=_LIMIT_S,
        env=plain_environment(),
    )
    python = folder / "bin" / "python"
    install("--python", str(python), *packages)
    return python


def install(*options: str) -> None:
    """`uv pip install`"""
    subprocess.run(
        [UV, "pip", "install", "--quiet", *options], check=True, timeout=_LIMIT_S, env=plain_environment()
    )


def plain_environment() -> dict[str, str]:
    """The variables of this process without the way to this project's packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
