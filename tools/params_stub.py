"""Writes the static types of the parameters of `LLM` that are derived from the contract."""

from __future__ import annotations

from pathlib import Path

from triptych_cli.offline.params import plain_params

PATH = Path("triptych_cli/offline/plain_params.pyi")
_HEAD = """# Written by `make protos`.
from collections.abc import Sequence
from dataclasses import dataclass

@dataclass(frozen=True, slots=True, kw_only=True)
class PlainParams:
"""


def stub() -> str:
    """The text of the stub."""
    lines = []
    for name, kind, default in plain_params():
        shown = kind.__name__ if isinstance(kind, type) else str(kind).removeprefix("collections.abc.")
        lines.append(f"    {name}: {shown} = {default!r}\n")
    return _HEAD + "".join(lines)


if __name__ == "__main__":
    PATH.write_text(stub())
