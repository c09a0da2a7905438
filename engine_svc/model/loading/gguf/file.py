"""Reads the headers of GGUF files within limits of its own: metadata, and where each tensor is. No torch.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedIOBase
from pathlib import Path

from engine_svc.model.errors import CheckpointError

_MAGIC, _LFS_POINTER = b"GGUF", b"vers"
_VERSIONS = (2, 3)
# The header of a vocabulary of 262,144 tokens has 8 MB.
_MAX_HEADER_BYTES = 64 << 20
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_STRINGS = 1 << 22  # in all arrays together
_MAX_TEXT_BYTES = 4 << 20
_MAX_NAME_BYTES = 1 << 10
_MAX_SHARDS = 1000
_MAX_DIMENSIONS = 4
_READ_BYTES = 1 << 20
_DEFAULT_ALIGNMENT = 32
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

# Numbers of the kinds of values; of those that are numbers, their format.
_F32, _STRING, _ARRAY = 6, 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", _F32: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorType:
    """How numbers are stored: `block_size` neighbours in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1


# By the number that files have for it.
TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Where a tensor is in its file. `shape` is row-major: neighbours are in the last dimension."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int  # of its first byte, from the beginning of the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block_size * self.type.block_bytes


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the metadata, decoded when it is asked for."""

    kind: int
    length: int
    content: bytes = field(repr=False)

    def numbers(self) -> tuple[int | float, ...]:
        """Raises ValueError for other elements."""
        if self.kind not in _FORMATS:
            raise ValueError("has texts, must have numbers")
        return struct.unpack(f"<{self.length}{_FORMATS[self.kind]}", self.content)

    def texts(self) -> list[str]:
        """Raises ValueError for other elements, and for bytes that are not UTF-8."""
        if self.kind != _STRING:
            raise ValueError("has numbers, must have texts")
        texts, position, content, length_at = [], 0, self.content, _U64.unpack_from
        for _ in range(self.length):
            start = position + _U64.size
            position = start + length_at(content, position)[0]
            texts.append(content[start:position].decode())
        return texts


Value = bool | int | float | str | Array


class Metadata:
    """Values by key, checked when they are read. Raises CheckpointError, with key, value and what it must be.

    A key without a default is required.
    """

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._refusal(key, value, "a text")
        return value

    def whole(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = (1 << 31) - 1
    ) -> int:
        value = self._value(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self._refusal(key, value, f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool | str | Array) or not math.isfinite(value):
            raise self._refusal(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._refusal(key, value, "true or false")
        return value

    def numbers(self, key: str) -> tuple[int | float, ...]:
        array = self._array(key)
        try:
            return array.numbers()
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {key} {error}") from error

    def texts(self, key: str) -> list[str]:
        array = self._array(key)
        try:
            return array.texts()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {key} has a text that is not UTF-8: {error}") from error
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {key} {error}") from error

    def _array(self, key: str) -> Array:
        value = self._value(key, None)
        if not isinstance(value, Array):
            raise self._refusal(key, value, "an array")
        return value

    def _value(self, key: str, default: Value | None) -> Value:
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path} lacks {key} in its metadata")
        return value

    def _refusal(self, key: str, value: Value, expected: str) -> CheckpointError:
        shown = f"an array of {value.length}" if isinstance(value, Array) else repr(value)[:80]
        return CheckpointError(f"{self.path}: {key} is {shown}, must be {expected}")


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of one file, all of whose tensors lie within it."""

    path: Path
    metadata: Metadata
    tensors: Mapping[str, FileTensor]
    content: bytes = field(repr=False)
    num_bytes: int  # of the file


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model in one file, or in shards, of which the first has the metadata."""

    headers: tuple[GgufHeader, ...]
    tensors: Mapping[str, FileTensor]  # of all files

    @property
    def path(self) -> Path:
        return self.headers[0].path

    @property
    def metadata(self) -> Metadata:
        return self.headers[0].metadata

    def read_f32(self, name: str) -> list[float]:
        """A small tensor of type F32. Raises CheckpointError."""
        header = next(header for header in self.headers if name in header.tensors)
        tensor = header.tensors[name]
        if tensor.type is not TYPES[0] or tensor.num_bytes > _READ_BYTES:
            raise CheckpointError(f"{header.path}: {name} is {tensor.type.name}, must be F32, and small")
        try:
            with header.path.open("rb") as file:
                file.seek(tensor.offset)
                content = file.read(tensor.num_bytes)
            return list(struct.unpack(f"<{math.prod(tensor.shape)}f", content))
        except (OSError, struct.error) as error:
            raise CheckpointError(f"{header.path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _File:
    """A file by its inode, size and times, by whatever link it was opened."""

    path: Path = field(compare=False)
    identity: tuple[int, ...]

    @classmethod
    def at(cls, path: Path) -> _File:
        try:
            stat = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        return cls(path, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))


def read_model(paths: Sequence[Path]) -> GgufModel:
    """The headers of a model's file, or of all of its shards in order. Raises CheckpointError.

    Those of the last model are kept until `forget_model`, as a start reads them several times.
    """
    model = _read_model(tuple(_File.at(path) for path in paths))
    headers = (replace(header, path=path) for header, path in zip(model.headers, paths, strict=True))
    return replace(model, headers=tuple(headers))


def forget_model() -> None:
    """Release the headers that are kept: with a large vocabulary they take megabytes."""
    _read_model.cache_clear()


@functools.lru_cache(maxsize=1)
def _read_model(files: tuple[_File, ...]) -> GgufModel:
    paths = [file.path for file in files]
    headers = tuple(read_header(path) for path in paths)
    seen: dict[str, Path] = {}
    for index, header in enumerate(headers):
        count = header.metadata.whole("split.count", 1)
        number = header.metadata.whole("split.no", index, minimum=0)
        if count != len(headers) or number != index:
            raise CheckpointError(
                f"{header.path} is shard {number + 1} of {count} by its metadata, "
                f"{index + 1} of {len(headers)} by its name"
            )
        for name in header.tensors:
            if name in seen:
                raise CheckpointError(f"{header.path} has {name}, as has {seen[name]}")
            seen[name] = header.path
    total = headers[0].metadata.whole("split.tensors.count", len(seen), minimum=0)
    if total != len(seen):
        raise CheckpointError(f"{paths[0]}: there have to be {total} tensors in all shards, not {len(seen)}")
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    return GgufModel(headers, tensors)


def shard_paths(path: Path) -> list[Path]:
    """The file itself, or all shards of the model that it is one of. Raises CheckpointError."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    if not 1 <= int(match[2]) <= count <= _MAX_SHARDS:
        raise CheckpointError(
            f"{path} is by its name shard {int(match[2])} of {count}, of up to {_MAX_SHARDS}"
        )
    paths = [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing := [each.name for each in paths if not each.is_file()]:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of {count} shards: {', '.join(missing[:5])}"
        )
    return paths


def model_stem(path: Path) -> str:
    """The name of the file without its suffix, and without the number of a shard."""
    match = _SHARD.fullmatch(path.name)
    return path.stem if match is None else match[1]


def read_header(path: Path) -> GgufHeader:
    """The header of one file. Raises CheckpointError for one that is no GGUF file, is damaged or cut off."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _Reader(path, file, size).header()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader:
    """Reads a header from its beginning, into memory as far as it has got."""

    def __init__(self, path: Path, file: BufferedIOBase, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._content = bytearray()
        self._position = 0
        self._num_strings = 0

    def header(self) -> GgufHeader:
        self._check_kind()
        num_tensors = self._count("tensors", _MAX_TENSORS)
        num_keys = self._count("keys of metadata", _MAX_KEYS)
        values: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._name("a key of metadata")
            if key in values:
                raise self._damaged(f"{key} is there twice")
            values[key] = self._value(key, self._number("I", f"the kind of {key}"))
        metadata = Metadata(self._path, values)
        described = [self._tensor() for _ in range(num_tensors)]
        content = bytes(self._content[: self._position])
        alignment = metadata.whole("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment}, must be a power of 2")
        tensors = self._placed(described, alignment)
        return GgufHeader(self._path, metadata, tensors, content, self._size)

    def _check_kind(self) -> None:
        magic = bytes(self._take(min(self._size, len(_MAGIC)), "the magic bytes"))
        if magic == _LFS_POINTER:
            raise CheckpointError(
                f"{self._path} is a pointer of Git LFS: run `git lfs pull` in {self._path.parent}"
            )
        if magic != _MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it begins with {magic!r}")
        version = self._number("I", "the version")
        if not version & 0xFFFF and version:
            raise CheckpointError(f"{self._path} is a big-endian GGUF file; little-endian ones are read")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self._path} has GGUF version {version}; versions 2 and 3 are read")

    def _placed(
        self, described: Sequence[tuple[str, TensorType, tuple[int, ...], int]], alignment: int
    ) -> dict[str, FileTensor]:
        """The tensors by name, none of which overlap; offsets were relative to the end of the header."""
        begin = -(-self._position // alignment) * alignment
        tensors: dict[str, FileTensor] = {}
        for name, kind, shape, offset in described:
            if name in tensors:
                raise self._damaged(f"tensor {name} is there twice")
            if offset % alignment:
                raise self._damaged(f"tensor {name} has offset {offset}, no multiple of {alignment}")
            tensors[name] = FileTensor(name, kind, shape, begin + offset)
        end, previous = begin, "the header"
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self._damaged(f"tensor {tensor.name} overlaps {previous}")
            end, previous = tensor.offset + tensor.num_bytes, tensor.name
            if end > self._size:
                raise self._damaged(f"tensor {tensor.name} ends at byte {end}, the file at {self._size}")
        return tensors

    def _tensor(self) -> tuple[str, TensorType, tuple[int, ...], int]:
        """Name, type, shape and relative offset of the next tensor."""
        name = self._name("the name of a tensor")
        num_dimensions = self._number("I", f"the shape of tensor {name}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {num_dimensions} dimensions, of up to {_MAX_DIMENSIONS}")
        lengths = [self._number("Q", f"the shape of tensor {name}") for _ in range(num_dimensions)]
        number = self._number("I", f"the type of tensor {name}")
        kind = TYPES.get(number)
        if kind is None:
            raise CheckpointError(
                f"{self._path}: tensor {name} has type {_OTHER_TYPES.get(number, number)}; "
                f"read are {', '.join(each.name for each in TYPES.values())}"
            )
        offset = self._number("Q", f"the offset of tensor {name}")
        # No type takes less than half a byte for a number.
        if 0 in lengths or math.prod(lengths) > 2 * self._size:
            raise self._damaged(f"tensor {name} has shape {lengths}, the file {self._size} bytes")
        if lengths[0] % kind.block_size:
            raise self._damaged(
                f"tensor {name} has rows of {lengths[0]}, no multiple of the {kind.block_size} of {kind.name}"
            )
        return name, kind, tuple(reversed(lengths)), offset

    def _value(self, key: str, kind: int) -> Value:
        what = f"the value of {key}"
        if kind == _STRING:
            return self._text(what, _MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key, what)
        if kind not in _FORMATS:
            raise self._damaged(f"{key} has values of kind {kind}, which there is not")
        number = self._number(_FORMATS[kind], what)
        return _shortest(number) if kind == _F32 else number

    def _array(self, key: str, what: str) -> Array:
        kind = self._number("I", what)
        length = self._number("Q", what)
        if kind == _ARRAY:
            raise CheckpointError(f"{self._path}: {key} is an array of arrays, which is not read")
        start = self._position
        if kind == _STRING:
            self._num_strings += length
            if self._num_strings > _MAX_STRINGS:
                raise self._damaged(f"{key} has {length} texts, of up to {_MAX_STRINGS} in the file")
            self._skip_texts(length, what)
        elif kind in _FORMATS:
            self._take(length * struct.calcsize(f"<{_FORMATS[kind]}"), what)
        else:
            raise self._damaged(f"{key} has values of kind {kind}, which there is not")
        return Array(kind, length, bytes(self._content[start : self._position]))

    def _skip_texts(self, number: int, what: str) -> None:
        content, position, length_at = self._content, self._position, _U64.unpack_from
        for _ in range(number):
            start = position + _U64.size
            if start > len(content):
                self._read_on(start, what)
            position = start + length_at(content, position)[0]
            if position > len(content):
                self._read_on(position, what)
        self._position = position

    def _count(self, what: str, limit: int) -> int:
        number: int = self._number("Q", f"the number of {what}")
        if number > limit:
            raise self._damaged(f"it has {number} {what}, of up to {limit}")
        return number

    def _name(self, what: str) -> str:
        name = self._text(what, _MAX_NAME_BYTES)
        if not name.isprintable():
            raise self._damaged(f"{what} is {name[:80]!r}")
        return name

    def _text(self, what: str, limit: int) -> str:
        length = self._number("Q", what)
        if length > limit:
            raise self._damaged(f"{what} has {length} bytes, of up to {limit}")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} is not UTF-8") from error

    def _number(self, kind: str, what: str) -> int:
        number: int
        (number,) = struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}"), what))
        return number

    def _take(self, num_bytes: int, what: str) -> bytearray:
        start, end = self._position, self._position + num_bytes
        if end > len(self._content):
            self._read_on(end, what)
        self._position = end
        return self._content[start:end]

    def _read_on(self, end: int, what: str) -> None:
        """Have the file's bytes up to `end` in memory, all of them present."""
        if end > self._size:
            raise self._damaged(f"{what} ends at byte {end}, the file at {self._size}")
        if end > _MAX_HEADER_BYTES:
            raise self._damaged(f"{what} ends at byte {end}, a header takes up to {_MAX_HEADER_BYTES}")
        # Ever more at once: a large header is not copied as often as it has pieces.
        wanted = max(end - len(self._content), _READ_BYTES, len(self._content))
        self._content += self._file.read(min(wanted, _MAX_HEADER_BYTES))
        if end > len(self._content):
            raise self._damaged(f"it ended at byte {len(self._content)} while it was read")

    def _damaged(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {fault}")


def _shortest(number: float) -> float:
    """The number of fewest digits that rounds to this one of 32 bits: 1e-06, not 9.999999974752427e-07."""
    stored = struct.pack("<f", number)
    candidates = (float(f"{number:.{digits}g}") for digits in range(6, 10))
    return next((short for short in candidates if struct.pack("<f", short) == stored), number)
