"""Notices that files were replaced, such as a renewed certificate or a list of keys."""

from __future__ import annotations

import os
from collections.abc import Sequence

Version = tuple[tuple[int, int, int, int], ...]


def version_of(paths: Sequence[str]) -> Version:
    """Differs after one of the files was written or replaced, or can be read by others than before.

    A file that is missing counts as a version.
    """
    return tuple(map(_version, paths))


def _version(path: str) -> tuple[int, int, int, int]:
    try:
        # Follows links: a mounted secret is replaced by another target of its link.
        status = os.stat(path)
    except OSError:
        return 0, 0, 0, 0
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
