"""Compose files as a compose engine reads them: variables replaced, anchors merged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
GPU_FILE = ROOT / "docker-compose.yml"
CPU_FILE = ROOT / "docker-compose.cpu.yml"

_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z_0-9]*)(?::-(?P<default>[^}]*))?\})")


def variables_of(path: Path) -> dict[str, str]:
    """The variables that a file takes from its surroundings, with what counts where they are unset."""
    found = (match for match in _VARIABLE.finditer(_uncommented(path)) if match["name"])
    return {match["name"]: match["default"] or "" for match in found}


def read(path: Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The content of a file in these surroundings; raises ValueError where a dollar sign means nothing."""

    def replaced(match: re.Match[str]) -> str:
        if match["name"] is None:
            return "$"
        return (environment or {}).get(match["name"]) or match["default"] or ""

    text = _VARIABLE.sub(replaced, _uncommented(path))
    if "$" in _VARIABLE.sub("", _uncommented(path)):
        raise ValueError(
            f"{path.name} has a dollar sign that begins no variable of the form ${{NAME:-default}}"
        )
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def flags_of(service: Mapping[str, Any]) -> list[str]:
    return [str(argument) for argument in service.get("command", [])]


def _uncommented(path: Path) -> str:
    lines = path.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.lstrip().startswith("#"))
