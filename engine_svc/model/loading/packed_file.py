"""One file of packed weights: how it is written, checked and mapped. Knows no model and no folder.

A prefix, a header in JSON, and the tensors. The prefix has the digest of the header, and the header the size
of the file, so that one that is cut off or of another version is noticed without reading the weights.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triptych_kernels import LARGE_PAGE_BYTES, PackedParts, own_panels

_MAGIC = b"triptych packed\n"
_VERSION = 1
_PREFIX = struct.Struct("<16sIQ32s")  # magic, version, the header's size and sha256
_MAX_HEADER_BYTES = 1 << 28
# Kernels read whole cache lines.
_ALIGNMENT = 64
# A file system that keeps files in large pages makes pages of what one call writes.
_WRITTEN_AT_ONCE = 4 * LARGE_PAGE_BYTES
_COPIED_AT_ONCE = 32 * LARGE_PAGE_BYTES
# Python runs no other thread in such a call, which waits for the disk.
_POPULATED_AT_ONCE = 8 * LARGE_PAGE_BYTES
_MADV_POPULATE_READ = 22  # since Linux 5.14
_LARGE_PAGES = re.compile(r"FilePmdMapped:\s+(\d+) kB")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
    )
}


class BrokenFile(ValueError):
    """A file that is none of packed weights, of another version, or damaged."""


def why_not_trusted(found: os.stat_result) -> str:
    """Why a file, or what is in a folder, may be another user's than this one's or root's; "" if it is not.

    Its group is trusted: that it may write has been decided by somebody.
    """
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}"
    return "all users may write it" if found.st_mode & stat.S_IWOTH else ""


def num_bytes_of(entries: Mapping[str, PackedParts]) -> int:
    """About the size of the file."""
    return sum(tensor.nbytes for parts in entries.values() for tensor in parts.tensors)


def write_file(path: Path, entries: Mapping[str, PackedParts], notes: Mapping[str, object]) -> None:
    """Write a new file, in full and on the disk when this returns.  notes: of what JSON has.

    Raises OSError, also where there is one.
    """
    offset = 0
    tensors: list[Tensor] = []
    described: list[tuple[str, list[int], int]] = []
    for parts in entries.values():
        for tensor in parts.tensors:
            described.append((str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset))
            tensors.append(tensor)
            offset += _aligned(tensor.nbytes, _ALIGNMENT)
    header = json.dumps(
        {
            "entries": {name: [parts.content, len(parts.tensors)] for name, parts in entries.items()},
            "tensors": described,
            "num_bytes": offset,
            "notes": notes,
        }
    ).encode()
    with path.open("xb", buffering=0) as file:
        chunks = _Chunks(file.fileno())
        chunks.add(_PREFIX.pack(_MAGIC, _VERSION, len(header), hashlib.sha256(header).digest()))
        chunks.add(header)
        chunks.fill_to(_data_offset(len(header)))
        for tensor in tensors:
            chunks.add(_bytes_of(tensor))
            chunks.fill_to(_aligned(chunks.num_bytes, _ALIGNMENT))
        # The end, too, is a large page then.
        chunks.fill_to(_file_size(len(header), offset))
        chunks.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class PackedFile:
    """What a file has: parts by name, in its memory, and its notes."""

    entries: Mapping[str, PackedParts]
    notes: Mapping[str, Any]
    shared_bytes: int  # of the file's own pages; 0 where its content was copied into pages of this process


def read_file(path: Path) -> PackedFile:
    """The content of a file; it is mapped where the system maps it in large pages, which are read faster.

    A store to a tensor changes neither the file nor what others have. Raises FileNotFoundError, OSError and
    BrokenFile, also for a file that another user may have written.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if reason := why_not_trusted(found):
            raise BrokenFile(reason)
        size = found.st_size
        header, num_header_bytes = _read_header(file.read(_PREFIX.size), file.read, size)
        content, is_shared = _content(file.fileno(), size)
    try:
        tensors = [
            _tensor(content, _data_offset(num_header_bytes), _DTYPES[dtype], shape, offset)
            for dtype, shape, offset in header["tensors"]
        ]
        entries, first = {}, 0
        for name, (parts, count) in header["entries"].items():
            entries[name] = PackedParts(parts, tuple(tensors[first : first + count]))
            first += count
        return PackedFile(entries, header["notes"], size if is_shared else 0)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise BrokenFile(f"its header describes no tensors: {error}") from error


class _Chunks:
    """Writes bytes in pieces of one size, but for the last."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray(_WRITTEN_AT_ONCE)
        self._num_waiting = 0
        self.num_bytes = 0

    def add(self, content: bytes | memoryview) -> None:
        rest = memoryview(content)
        self.num_bytes += len(rest)
        while rest:
            count = min(len(rest), _WRITTEN_AT_ONCE - self._num_waiting)
            self._waiting[self._num_waiting : self._num_waiting + count] = rest[:count]
            self._num_waiting += count
            rest = rest[count:]
            if self._num_waiting == _WRITTEN_AT_ONCE:
                self.flush()

    def fill_to(self, num_bytes: int) -> None:
        self.add(bytes(num_bytes - self.num_bytes))

    def flush(self) -> None:
        rest = memoryview(self._waiting)[: self._num_waiting]
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._num_waiting = 0


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _data_offset(num_header_bytes: int) -> int:
    return _aligned(_PREFIX.size + num_header_bytes, _ALIGNMENT)


def _file_size(num_header_bytes: int, num_data_bytes: int) -> int:
    return _aligned(_data_offset(num_header_bytes) + num_data_bytes, LARGE_PAGE_BYTES)


def _aligned(num_bytes: int, alignment: int) -> int:
    return num_bytes + -num_bytes % alignment


def _read_header(prefix: bytes, read: Any, size: int) -> tuple[dict[str, Any], int]:
    """The header, and its number of bytes.  size: of the file."""
    try:
        magic, version, num_bytes, digest = _PREFIX.unpack(prefix)
    except struct.error as error:
        raise BrokenFile(f"it ends after {size} bytes") from error
    if magic != _MAGIC:
        raise BrokenFile(f"it begins with {magic!r}")
    if version != _VERSION:
        raise BrokenFile(f"it has version {version}, not {_VERSION}")
    content = read(num_bytes) if num_bytes <= _MAX_HEADER_BYTES else b""
    if hashlib.sha256(content).digest() != digest:
        raise BrokenFile("its header is not the one that was written")
    header: dict[str, Any] = json.loads(content)
    expected = _file_size(num_bytes, header["num_bytes"])
    if size != expected:
        raise BrokenFile(f"it has {size} bytes, its header describes {expected}")
    return header, num_bytes


def _tensor(content: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int], offset: int) -> Tensor:
    first = start + offset
    return content[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _content(descriptor: int, size: int) -> tuple[Tensor, bool]:
    """The bytes of a file, and whether they are its own pages. Raises OSError, also for a broken disk."""
    # Private: a store makes a page of its own. Reading, all processes have the same pages.
    mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        for start in range(0, size, _POPULATED_AT_ONCE):
            mapping.madvise(_MADV_POPULATE_READ, start, min(_POPULATED_AT_ONCE, size - start))
    except OSError as error:
        # An older kernel finds pages as they are read.
        if error.errno != errno.EINVAL:
            raise
    mapped = torch.frombuffer(mapping, dtype=torch.uint8)
    if _num_large_bytes(mapped.data_ptr()) >= size:
        return mapped, True
    own = own_panels(size)
    for start in range(0, size, _COPIED_AT_ONCE):
        part = slice(start, min(start + _COPIED_AT_ONCE, size))
        own[part].copy_(mapped[part])
        # Never both in memory.
        mapping.madvise(mmap.MADV_DONTNEED, part.start, part.stop - part.start)
    return own, False


def _num_large_bytes(address: int) -> int:
    """Bytes of the mapping at an address that are in large pages of its file."""
    is_it = False
    with contextlib.suppress(OSError), Path("/proc/self/smaps").open(encoding="utf-8") as lines:
        for line in lines:
            # A mapping begins with its addresses, in small letters; what is said of it with a capital.
            if not line[0].isupper():
                is_it = int(line.partition("-")[0], 16) == address
            elif is_it and (found := _LARGE_PAGES.match(line)):
                return int(found[1]) * 1024
    return 0
