"""Notices that files were replaced, such as a renewed certificate or a list of keys."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

Version = tuple[tuple[int, int, int, int], ...]

# Longer than a tick of the clock by which file systems stamp changes; FAT's has 2 s.
_TICK_NS = 2_000_000_000


def version_of(paths: Sequence[str]) -> Version:
    """Differs after one of the files was written or replaced, or can be read by others than before.

    A file that is missing counts as a version.
    """
    return tuple(map(_version, paths))


def is_recent(version: Version) -> bool:
    """Whether a file changed so lately that a further change could leave its version as it is."""
    newest_ns = max((changed_ns for _, changed_ns, *_ in version), default=0)
    return abs(time.time_ns() - newest_ns) < _TICK_NS


def _version(path: str) -> tuple[int, int, int, int]:
    try:
        # Follows links: a mounted secret is replaced by another target of its link.
        status = os.stat(path)
    except OSError:
        return 0, 0, 0, 0
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
