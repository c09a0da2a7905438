"""What this software calls itself."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version of the installed package, or what a bare source tree is called."""
    try:
        return version("triptych")
    except PackageNotFoundError:
        return "(source tree)"
