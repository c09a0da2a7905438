"""Segments of this host's shared memory, each owned by a lock that dies with the process that made it.

A segment is a file of /dev/shm that appears under its name at once with its content and its lock. Whoever
finds one without a lock knows that nobody owns it any more, whatever process ids mean where it looks. Bytes
are read and written, never mapped: a file that another process cuts short must not take this one down.
Knows no tensors and no wire.
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
    """One segment of this process. Whoever takes its content removes its name, which frees the memory."""

    def __init__(self, name: str, size_bytes: int, descriptor: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self._descriptor = descriptor

    @property
    def is_taken(self) -> bool:
        """Whether its name is gone, i.e. nobody can take it any more."""
        return self._descriptor < 0 or os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Remove it, whether or not it was taken. What the system refuses to remove is left to a sweep."""
        if self._descriptor < 0:
            return
        if not self.is_taken:
            remove(self.name)
        # With it goes the lock.
        os.close(self._descriptor)
        self._descriptor = -1


def is_available() -> bool:
    """Whether segments can be made here; the rest of the world has no such folder."""
    return hasattr(os, "O_TMPFILE") and os.access(FOLDER, os.R_OK | os.W_OK | os.X_OK)


def segment_name(owner_id: str, number: int) -> str:
    """The name of the owner's segment of this number, below 10^19."""
    return f"triptych-{_owner_digits(owner_id)}-{number}"


def is_name_of(name: str, owner_id: str) -> bool:
    """Whether `name` is one that `owner_id` could have given."""
    match = _NAME.fullmatch(name)
    return match is not None and match[1] == _owner_digits(owner_id)


def create(name: str, content: bytes | memoryview) -> Segment:
    """A new segment that the user of this process alone may read. OSError where it cannot be.

    A process that is killed on the way leaves nothing, for the name comes last.
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
    """A copy of `size` bytes from `offset` on of a segment of this user.

    OSError where there is none, ValueError where it is something else, or shorter.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError("this is no name of a segment")
    descriptor = _open(name)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError("this is no segment of the user of this process alone")
        if size > _MAX_READ_BYTES or offset + size > status.st_size:
            raise ValueError(f"it has {status.st_size} bytes, {size} from {offset} on are asked for")
        content = os.pread(descriptor, size, offset)
        if len(content) != size:
            raise ValueError(f"it has become shorter than {offset + size} bytes")
        return content
    finally:
        os.close(descriptor)


def remove(name: str) -> None:
    """Remove the name of a segment; nothing where it is gone already.

    One that the system refuses to remove just now is left to its owner, and to a sweep.
    """
    try:
        _unlink(name)
    except OSError as error:
        logger.warning("segment not removed", extra={"segment": name, "reason": error.strerror})


def sweep() -> int:
    """Remove segments of this user whose owner is dead, and say how many. Looks at so many files at most.

    OSError where the system refuses that just now: a later sweep finds them too.
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
    # A name that was put there by somebody else may be a link or a pipe.
    return os.open(FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _owner_digits(owner_id: str) -> str:
    return hashlib.sha256(owner_id.encode()).hexdigest()[:32]
