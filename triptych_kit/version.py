"""The version of this software."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version of the installed package; "(source tree)" without one."""
    try:
        return version("triptych")
    except PackageNotFoundError:
        return "(source tree)"
