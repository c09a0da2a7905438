"""The folder of the user's cache for what is made of models. Others know what is in it."""

from __future__ import annotations

from pathlib import Path

from triptych_kit.config import read_environment


def user_cache() -> Path | None:
    """The folder, which need not exist; None where there is no home folder."""
    given = read_environment("XDG_CACHE_HOME")
    # As the specification of these folders says, relative paths are ignored.
    try:
        base = Path(given) if given.startswith("/") else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "triptych"
