"""Tokenizer results as plain data: ids with offsets, rendered prompts, a tokenizer's files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import grpc

from triptych.api.v1 import tokenize_pb2, tokenizer_pb2
from triptych_client.errors import TriptychError

# A tokenizer has a few MiB; this stops an endless stream.
_MAX_FILES_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a text: its name in the vocabulary, and its start and end offsets in characters."""

    token_id: int
    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The prompt of a conversation, as text and as token ids."""

    text: str
    token_ids: tuple[int, ...]


def read_token_ids(response: tokenize_pb2.TokenizeResponse) -> list[int]:
    return list(response.token_ids)


def read_tokens(response: tokenize_pb2.TokenizeResponse) -> list[Token]:
    columns = zip(
        response.token_ids, response.tokens, response.start_offsets, response.end_offsets, strict=True
    )
    return [Token(*row) for row in columns]


def read_prompt(response: tokenizer_pb2.ApplyChatTemplateResponse) -> RenderedPrompt:
    return RenderedPrompt(response.prompt, tuple(response.token_ids))


class FileAssembler:
    """Assembles a tokenizer's files from chunks, and verifies them."""

    def __init__(self) -> None:
        self._contents: dict[str, bytearray] = {}
        self._last: dict[str, tokenizer_pb2.GetTokenizerResponse] = {}
        self._num_bytes = 0

    def add(self, response: tokenizer_pb2.GetTokenizerResponse) -> None:
        """Add the next chunk. Raises TriptychError if it is out of order or the files are too large."""
        content = self._contents.setdefault(response.file_name, bytearray())
        self._num_bytes += len(response.chunk)
        if response.offset != len(content):
            raise _loss(f"{response.file_name} goes on at byte {response.offset}, {len(content)} are here")
        if self._num_bytes > _MAX_FILES_BYTES:
            raise _loss(f"the tokenizer has more than {_MAX_FILES_BYTES} bytes")
        content += response.chunk
        self._last[response.file_name] = response

    def files(self) -> dict[str, bytes]:
        """The files by name. Raises TriptychError if the size or digest of one is wrong."""
        for name, last in self._last.items():
            content = self._contents[name]
            if len(content) != last.size_bytes or hashlib.sha256(content).hexdigest() != last.sha256:
                raise _loss(f"{name} did not arrive as it was sent")
        return {name: bytes(content) for name, content in self._contents.items()}


def to_chunk(response: tokenizer_pb2.GetTokenizerResponse) -> tokenizer_pb2.GetTokenizerResponse:
    """The event of a chunk is the chunk itself."""
    return response


def _loss(message: str) -> TriptychError:
    return TriptychError(grpc.StatusCode.DATA_LOSS, message)
