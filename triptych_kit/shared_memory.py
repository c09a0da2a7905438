"""Shared-memory segments, each held by a file lock that is released when its process dies.

A segment is a file in /dev/shm that appears under its name together with its content and its lock. A segment
without a lock has no owner any more; this also works across PID namespaces. Bytes are read and written, never
mapped: a file that another process truncates must not crash this one. Knows no tensors and no wire.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")

_NAME = re.compile(r"triptych-([0-9a-f]{32})-([0-9]{1,19})")
_MAX_ENTRIES_A_SWEEP = 4096
_MAX_READ_BYTES = 1 << 30


class Segment:
    """One segment of this process. Its receiver removes the name, which frees the memory."""

    def __init__(self, name: str, size_bytes: int, descriptor: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self._descriptor = descriptor

    @property
    def is_taken(self) -> bool:
        """Whether its name is removed, so that no process can read it any more."""
        return self._descriptor < 0 or os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Remove it, whether or not it was taken. If the system refuses, a sweep removes it later."""
        if self._descriptor < 0:
            return
        if not self.is_taken:
            remove(self.name)
        # This releases the lock.
        os.close(self._descriptor)
        self._descriptor = -1


def is_available() -> bool:
    """Whether segments can be created on this system (Linux with a writable /dev/shm)."""
    return hasattr(os, "O_TMPFILE") and os.access(FOLDER, os.R_OK | os.W_OK | os.X_OK)


def segment_name(owner_id: str, number: int) -> str:
    """The name of the owner's segment with this number, below 10^19."""
    return f"triptych-{_owner_digits(owner_id)}-{number}"


def is_name_of(name: str, owner_id: str) -> bool:
    """Whether `name` is a segment name of `owner_id`."""
    match = _NAME.fullmatch(name)
    return match is not None and match[1] == _owner_digits(owner_id)


def create(name: str, content: bytes | memoryview) -> Segment:
    """Create a segment that only the user of this process may read. Raises OSError on failure.

    The name is linked last, so a process that is killed meanwhile leaves nothing.
    """
    descriptor = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        view, written = memoryview(content), 0
        while written < len(view):
            written += os.write(descriptor, view[written:])
        folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(folder)
    except OSError:
        os.close(descriptor)
        raise
    return Segment(name, len(view), descriptor)


def read(name: str, offset: int, size: int) -> bytes:
    """A copy of `size` bytes from `offset` of a segment of this user.

    Raises OSError if it does not exist, ValueError if it is not a segment of this user or is too short.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError("this is not the name of a segment")
    descriptor = _open(name)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError("this is not a segment that only the user of this process may read")
        if size > _MAX_READ_BYTES or offset + size > status.st_size:
            raise ValueError(f"it has {status.st_size} bytes, {size} from offset {offset} are requested")
        content = os.pread(descriptor, size, offset)
        if len(content) != size:
            raise ValueError(f"it has become shorter than {offset + size} bytes")
        return content
    finally:
        os.close(descriptor)


def remove(name: str) -> None:
    """Remove the name of a segment; no error if it is gone already.

    If the system refuses, its owner or a sweep removes it later.
    """
    try:
        _unlink(name)
    except OSError as error:
        logger.warning("shared-memory segment not removed", extra={"segment": name, "reason": error.strerror})


def sweep() -> int:
    """Remove segments of this user whose owner is dead; returns their number. Scans at most 4,096 files.

    Raises OSError if the system refuses; a later sweep finds them again.
    """
    num_removed = 0
    with os.scandir(FOLDER) as entries:
        for _, entry in zip(range(_MAX_ENTRIES_A_SWEEP), entries, strict=False):
            if _NAME.fullmatch(entry.name) is not None and _is_abandoned(entry.name):
                _unlink(entry.name)
                num_removed += 1
    return num_removed


def _unlink(name: str) -> None:
    if _NAME.fullmatch(name) is not None:
        (FOLDER / name).unlink(missing_ok=True)


def _is_abandoned(name: str) -> bool:
    try:
        descriptor = _open(name)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _open(name: str) -> int:
    # A file with such a name that another process created may be a link or a pipe.
    return os.open(FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _owner_digits(owner_id: str) -> str:
    return hashlib.sha256(owner_id.encode()).hexdigest()[:32]
