"""Packed weights that are kept in a folder: a second start reads them in place of packing weights again.

A file has those of one model, or of a rank's share of it, in one layout. Its name has the digest of what they
depend on: which files the weights are in, and with what code, in which layout they were packed. Engines of a
host share the file's memory. Keeping them is never needed: what goes wrong is a warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast

import triptych_kernels
from engine_svc.model.loading.checkpoint import WeightFile
from engine_svc.model.loading.packed_file import (
    BrokenFile,
    PackedFile,
    num_bytes_of,
    read_file,
    why_not_trusted,
    write_file,
)
from triptych_kernels import Experts, Linear, Ops, PackedParts

logger = logging.getLogger(__name__)

_SUFFIX, _LOCK_SUFFIX, _UNFINISHED_SUFFIX = ".packed", ".lock", ".unfinished"
_ABANDONED_S = 24 * 3600.0  # an unfinished file that old has no writer any more
_POLL_S = 0.1
_NO_NAME = re.compile(r"[^\w.-]+")
_MAX_NAME = 80

P = TypeVar("P", bound=Linear | Experts)


@dataclass(frozen=True, slots=True)
class PackedWeightsOptions:
    """Where packed weights are kept, and which.

    max_bytes: of all files; beyond, those that have not been used for longest are removed.
    min_bytes: of the files of a model's weights; smaller ones are packed again in a moment.
    is_written: whether those that are not there are added.
    wait_s: how long to wait for another process that packs the same weights.
    """

    folder: Path
    max_bytes: int
    min_bytes: int = 64 << 20
    is_written: bool = True
    wait_s: float = 120.0


class PackedWeights(Protocol):
    """Gives a builder what is packed of its weights."""

    def has(self, name: str) -> bool:
        """Whether `get` need not pack."""

    def get(self, name: str, pack: Callable[[], P]) -> P:
        """What `pack` returns, or the same as it was kept under this name, which occurs once in a model."""


class NothingKept:
    """Packs all."""

    def has(self, name: str) -> bool:
        return False

    def get(self, name: str, pack: Callable[[], P]) -> P:
        return pack()


class Unwritten(NothingKept):
    """Packs all, under a lock; what was packed can be written."""

    def __init__(self, ops: Ops, options: PackedWeightsOptions, path: Path) -> None:
        self._ops, self._options, self._path = ops, options, path

    def write(self, entries: Mapping[str, PackedParts], notes: Mapping[str, object]) -> bool:
        """Write what was packed, if there is room for it.  notes: for later starts."""
        num_bytes = num_bytes_of(entries)
        try:
            if not entries or not self._has_room(num_bytes):
                return False
            _write(self._path, entries, notes)
        except OSError as error:
            _warn_not_kept(self._path.parent, error.strerror or str(error))
            return False
        return True

    def reopened(self) -> Kept | NothingKept:
        """Those of the file that was written."""
        file = _read(self._path)
        return NothingKept() if file is None else Kept(self._ops, self._path, file)

    def _has_room(self, num_bytes: int) -> bool:
        """Removes what has not been used for longest, as far as that is needed."""
        folder, limit = self._path.parent, self._options.max_bytes
        if num_bytes > limit:
            _warn_not_kept(folder, f"{num_bytes} bytes are more than its limit of {limit}")
            return False
        for used_at, _, path in _files(folder, _UNFINISHED_SUFFIX):
            if time.time() - used_at > _ABANDONED_S:
                path.unlink(missing_ok=True)
        kept = _files(folder, _SUFFIX)
        total, free = sum(size for _, size, _ in kept), shutil.disk_usage(folder).free
        # Where removing does not help, all stay.
        for _, size, path in kept if num_bytes < free + total else ():
            if total + num_bytes <= limit and num_bytes < free:
                break
            path.unlink(missing_ok=True)
            logger.info("packed weights removed", extra={"path": str(path), "size_bytes": size})
            total, free_before, free = total - size, free, shutil.disk_usage(folder).free
            # One that another engine has open takes its room until that ends, as the others may.
            if free <= free_before and total + num_bytes <= limit:
                break
        if num_bytes >= free:
            _warn_not_kept(folder, f"{num_bytes} bytes do not fit, {free} are free")
            return False
        return True


class Kept:
    """Those of a file. What it lacks is packed."""

    def __init__(self, ops: Ops, path: Path, file: PackedFile) -> None:
        self._ops, self._path = ops, path
        self._entries = file.entries
        self.notes = file.notes
        self.shared_bytes = file.shared_bytes

    def has(self, name: str) -> bool:
        return name in self._entries

    def get(self, name: str, pack: Callable[[], P]) -> P:
        parts = self._entries.get(name)
        if parts is None:
            return pack()
        try:
            return cast(P, self._ops.put_together(parts))  # As it was taken apart under this name.
        except ValueError as error:
            _warn_broken(self._path, error)
            self._entries = {}
            with contextlib.suppress(OSError):
                self._path.unlink()
            return pack()


class Collected:
    """The packed weights that a builder gets, with the names of the files that they can be written to.

    They are the memory of the model: of what the reference ops compute, there are none.
    """

    def __init__(self, ops: Ops, source: PackedWeights, file_name: str) -> None:
        self._ops, self._source, self._file_name = ops, source, file_name
        self.entries: dict[str, PackedParts] = {}
        self.notes: Mapping[str, object] = {}

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def get(self, name: str, pack: Callable[[], P]) -> P:
        assert name not in self.entries, f"{name} is packed twice"
        packed = self._source.get(name, pack)
        parts = self._ops.take_apart(packed)
        if parts is not None:
            self.entries[name] = parts
        return packed

    def save(self, folder: Path) -> Path:
        """Write a file that is read in place of packing, where `folder` is that of packed weights.

        Raises ValueError where there is nothing to write, OSError for a folder that cannot be used.
        """
        if not self.entries:
            raise ValueError("the weights of this engine have no packed form to write")
        folder.mkdir(0o755, parents=True, exist_ok=True)
        _check_folder(folder)
        path = folder / self._file_name
        _write(path, self.entries, self.notes)
        return path


@contextlib.contextmanager
def open_packed_weights(
    options: PackedWeightsOptions | None, file_name: str, ops: Ops
) -> Iterator[Kept | Unwritten | NothingKept]:
    """What is kept of a model's weights; if it is not, what is packed in the block can be written.

    file_name: see `packed_name`.  options: None: nothing is kept.
    """
    if options is None or not _is_usable(options.folder):
        yield NothingKept()
        return
    path = options.folder / file_name
    file = _read(path)
    if file is not None:
        yield Kept(ops, path, file)
        return
    if not options.is_written:
        yield NothingKept()
        return
    with contextlib.ExitStack() as stack:
        is_locked, has_waited = stack.enter_context(_locked(path, options.wait_s))
        if is_locked and not has_waited:
            yield Unwritten(ops, options, path)
            return
    # Another process may have written it meanwhile. What it could not keep is not tried again: engines that
    # start at once would pack one after the other.
    file = _read(path) if has_waited else None
    yield NothingKept() if file is None else Kept(ops, path, file)


def packed_name(name: str, digest: str, files: Sequence[WeightFile], layout: Mapping[str, object]) -> str:
    """The name of the file, with a digest of what packed weights depend on.

    name: of the model, for people who look into the folder.  digest: of headers and samples of the weights.
    files: that they are in; one that was written since is another.  layout: how they are packed, of what JSON
    has.
    """
    stats = [file.path.stat() for file in files]
    identity = {
        "weights": digest,
        "files": [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats],
        "layout": layout,
        "code": _code_digest(),
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    return f"{_NO_NAME.sub('-', name)[-_MAX_NAME:]}-{key}{_SUFFIX}"


def _write(path: Path, entries: Mapping[str, PackedParts], notes: Mapping[str, object]) -> None:
    """Write the file, whole or not at all. Raises OSError."""
    unfinished = path.with_suffix(_UNFINISHED_SUFFIX)
    started_at = time.perf_counter()
    try:
        # Of a process that was killed.
        unfinished.unlink(missing_ok=True)
        write_file(unfinished, entries, notes)
        unfinished.chmod(0o644)
        unfinished.rename(path)
        _sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    duration_s = round(time.perf_counter() - started_at, 3)
    extra = {"path": str(path), "size_bytes": num_bytes_of(entries), "duration_s": duration_s}
    logger.info("packed weights kept", extra=extra)


@functools.cache
def _code_digest() -> str:
    """Of the code that reads and packs weights, so that each version of it has files of its own."""
    kernels, model = Path(triptych_kernels.__file__).parent, Path(__file__).parent.parent
    sources = [
        *kernels.glob("*.py"),
        *(path for path in (kernels / "cpu").iterdir() if path.suffix in (".py", ".so")),
        *(model / "loading").rglob("*.py"),
        *(model / "native").glob("*.py"),
    ]
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _files(folder: Path, suffix: str) -> list[tuple[float, int, Path]]:
    """When they were last used, in that order, their sizes and paths."""
    found = []
    for path in folder.glob(f"*{suffix}"):
        # Other processes remove files, too.
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            found.append((stat.st_mtime, stat.st_size, path))
    return sorted(found)


def _is_usable(folder: Path) -> bool:
    """Whether no other user can have put files there; with a warning if one can. It need not exist."""
    try:
        _check_folder(folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        _warn_not_kept(folder, error.strerror or str(error))
        return False
    return True


def _check_folder(folder: Path) -> None:
    if reason := why_not_trusted(folder.stat()):
        raise PermissionError(errno.EPERM, reason)


def _read(path: Path) -> PackedFile | None:
    try:
        file = read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, BrokenFile) as error:
        _warn_broken(path, error)
        return None
    # The time of the last use decides which files are removed.
    with contextlib.suppress(OSError):
        os.utime(path)
    return file


@contextlib.contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[tuple[bool, bool]]:
    """Keep others from packing the same weights meanwhile: whether that succeeds, and with a wait."""
    lock_path = path.with_suffix(_LOCK_SUFFIX)
    descriptor, has_waited = None, False
    try:
        path.parent.mkdir(0o755, parents=True, exist_ok=True)
        # Another user may have been faster.
        _check_folder(path.parent)
        descriptor, has_waited = _lock(lock_path, wait_s)
    except OSError as error:
        _warn_not_kept(path.parent, error.strerror or str(error))
    try:
        yield descriptor is not None, has_waited
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                lock_path.unlink()
            os.close(descriptor)


def _lock(path: Path, wait_s: float) -> tuple[int | None, bool]:
    """The descriptor of the locked file, None if others have it all the time, and whether they had it."""
    deadline, has_waited = time.monotonic() + wait_s, False
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A process that is done removes the file: then the lock is one that others do not see.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor, has_waited
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                _warn_not_kept(path.parent, f"another process has packed them for {wait_s:g} s")
                return None, True
            if not has_waited:
                logger.info("waiting for another process that packs weights", extra={"lock": str(path)})
            time.sleep(_POLL_S)
        except OSError:
            os.close(descriptor)
            raise
        has_waited = True
        os.close(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _warn_not_kept(folder: Path, reason: str) -> None:
    logger.warning("packed weights are not kept", extra={"folder": str(folder), "reason": reason})


def _warn_broken(path: Path, error: Exception) -> None:
    logger.warning(
        "packed weights that were kept cannot be read: weights are packed again",
        extra={"path": str(path), "reason": str(error)},
    )
