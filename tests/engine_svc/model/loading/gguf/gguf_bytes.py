"""GGUF files written byte by byte, so that each part of them can be wrong."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

U32, F32, BOOL, TEXT, ARRAY, U64 = 4, 6, 7, 8, 9, 10
VOCABULARY = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab")
HIDDEN, INNER, HEADS, NUM_TOKENS = 32, 64, 4, len(VOCABULARY)


@dataclass(slots=True)
class Value:
    """A value of the metadata."""

    kind: int
    content: bytes


def u32(number: int) -> Value:
    return Value(U32, struct.pack("<I", number))


def f32(number: float) -> Value:
    return Value(F32, struct.pack("<f", number))


def flag(value: bool) -> Value:
    return Value(BOOL, bytes([value]))


def text(value: str | bytes, length: int | None = None) -> Value:
    """length: another one than it has."""
    content = value.encode() if isinstance(value, str) else value
    return Value(TEXT, struct.pack("<Q", len(content) if length is None else length) + content)


def array(kind: int, elements: Sequence[bytes], length: int | None = None) -> Value:
    number = len(elements) if length is None else length
    return Value(ARRAY, struct.pack("<IQ", kind, number) + b"".join(elements))


def texts(values: Sequence[str | bytes]) -> Value:
    return array(TEXT, [text(value).content for value in values])


def numbers(kind: int, values: Sequence[float]) -> Value:
    form = {F32: "<f", U32: "<I"}[kind]
    return array(kind, [struct.pack(form, value) for value in values])


@dataclass(slots=True)
class Described:
    """A tensor as its file describes it.  offset: None, behind the one before."""

    name: str
    lengths: tuple[int, ...]  # the last dimension first
    kind: int = 0
    offset: int | None = None
    content: bytes | None = None  # None: zeros of F32

    @property
    def data(self) -> bytes:
        return bytes(4 * math.prod(self.lengths)) if self.content is None else self.content


@dataclass(slots=True)
class GgufBytes:
    """A file, all parts of which may be changed before it is written."""

    keys: list[tuple[str | bytes, Value]]
    tensors: list[Described]
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None
    alignment: int = 32
    marks: dict[str, int] = field(default_factory=dict)  # where parts begin, once written

    def set(self, key: str, value: Value) -> GgufBytes:
        """With another value of a key, or one more key."""
        self.remove(key)
        self.keys.append((key, value))
        return self

    def remove(self, key: str) -> GgufBytes:
        self.keys = [(name, value) for name, value in self.keys if name != key]
        return self

    def tensor(self, name: str) -> Described:
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def written(self) -> bytes:
        content = b""
        for mark, part in self._parts():
            self.marks.setdefault(mark, len(content))
            content += part
        offsets, end = [], 0
        for tensor in self.tensors:
            offsets.append(end if tensor.offset is None else tensor.offset)
            end = offsets[-1] + _padded(len(tensor.data), self.alignment)
        for tensor, offset in zip(self.tensors, offsets, strict=True):
            name = struct.pack("<Q", len(tensor.name)) + tensor.name.encode()
            shape = struct.pack(f"<I{len(tensor.lengths)}Q", len(tensor.lengths), *tensor.lengths)
            for mark, part in (
                ("a tensor's name", name),
                ("a tensor's shape", shape),
                ("a tensor's type", struct.pack("<I", tensor.kind)),
                ("a tensor's offset", struct.pack("<Q", offset)),
            ):
                self.marks.setdefault(mark, len(content))
                content += part
        content = content.ljust(_padded(len(content), self.alignment), b"\0")
        self.marks["the first tensor"] = len(content)
        for tensor in self.tensors:
            self.marks["the last tensor"] = len(content)
            content += tensor.data.ljust(_padded(len(tensor.data), self.alignment), b"\0")
        return content

    def write(self, path: Path) -> Path:
        path.write_bytes(self.written())
        return path

    def _parts(self) -> Iterator[tuple[str, bytes]]:
        yield "the magic bytes", self.magic
        yield "the version", struct.pack("<I", self.version)
        count = len(self.tensors) if self.num_tensors is None else self.num_tensors
        yield "the number of tensors", struct.pack("<Q", count)
        count = len(self.keys) if self.num_keys is None else self.num_keys
        yield "the number of keys", struct.pack("<Q", count)
        for key, value in self.keys:
            name = key.encode() if isinstance(key, str) else key
            yield "a key", struct.pack("<Q", len(name)) + name
            yield "a kind", struct.pack("<I", value.kind)
            yield "an array" if value.kind == ARRAY else "a value", value.content


def tiny_llama() -> GgufBytes:
    """A model of one layer with weights of 0, and a vocabulary of bytes and two letters."""
    return GgufBytes(
        keys=[
            ("general.architecture", text("llama")),
            ("llama.block_count", u32(1)),
            ("llama.context_length", u32(128)),
            ("llama.embedding_length", u32(HIDDEN)),
            ("llama.feed_forward_length", u32(INNER)),
            ("llama.attention.head_count", u32(HEADS)),
            ("llama.attention.layer_norm_rms_epsilon", f32(1e-6)),
            ("tokenizer.ggml.model", text("llama")),
            ("tokenizer.ggml.tokens", texts(VOCABULARY)),
            ("tokenizer.ggml.scores", numbers(F32, [0.0] * NUM_TOKENS)),
            ("tokenizer.ggml.token_type", numbers(U32, [2, 3, 3, *[6] * 256, 1, 1, 1])),
            ("tokenizer.ggml.bos_token_id", u32(1)),
            ("tokenizer.ggml.eos_token_id", u32(2)),
            ("tokenizer.ggml.unknown_token_id", u32(0)),
        ],
        tensors=[
            Described("token_embd.weight", (HIDDEN, NUM_TOKENS)),
            Described("output_norm.weight", (HIDDEN,)),
            Described("blk.0.attn_norm.weight", (HIDDEN,)),
            *(Described(f"blk.0.attn_{name}.weight", (HIDDEN, HIDDEN)) for name in ("q", "k", "v", "output")),
            Described("blk.0.ffn_norm.weight", (HIDDEN,)),
            Described("blk.0.ffn_gate.weight", (HIDDEN, INNER)),
            Described("blk.0.ffn_up.weight", (HIDDEN, INNER)),
            Described("blk.0.ffn_down.weight", (INNER, HIDDEN)),
        ],
    )


def _padded(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment if alignment else length
