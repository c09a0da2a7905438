"""What comes back about tokens, as plain data: ids with places, rendered prompts, a tokenizer's files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import grpc

from triptych.api.v1 import tokenize_pb2, tokenizer_pb2
from triptych_client.errors import TriptychError

# A tokenizer is a few MiB; what goes on and on is none.
_MAX_FILES_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a text: the vocabulary's name of it, and from where to where it reaches, in characters."""

    token_id: int
    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The prompt of a conversation, as text and as tokens."""

    text: str
    token_ids: tuple[int, ...]


def read_token_ids(response: tokenize_pb2.TokenizeResponse) -> list[int]:
    """The ids alone."""
    return list(response.token_ids)


def read_tokens(response: tokenize_pb2.TokenizeResponse) -> list[Token]:
    """The tokens with their places."""
    columns = zip(
        response.token_ids, response.tokens, response.start_offsets, response.end_offsets, strict=True
    )
    return [Token(*row) for row in columns]


def read_prompt(response: tokenizer_pb2.ApplyChatTemplateResponse) -> RenderedPrompt:
    """The prompt of a conversation."""
    return RenderedPrompt(response.prompt, tuple(response.token_ids))


class FileAssembler:
    """Puts the chunks of a tokenizer's files together, and checks that they are whole."""

    def __init__(self) -> None:
        """Begin without a file."""
        self._contents: dict[str, bytearray] = {}
        self._last: dict[str, tokenizer_pb2.GetTokenizerResponse] = {}
        self._num_bytes = 0

    def add(self, response: tokenizer_pb2.GetTokenizerResponse) -> None:
        """Take the next chunk. Raises TriptychError for one that does not follow, or is too much."""
        content = self._contents.setdefault(response.file_name, bytearray())
        self._num_bytes += len(response.chunk)
        if response.offset != len(content):
            raise _loss(f"{response.file_name} goes on at byte {response.offset}, {len(content)} are here")
        if self._num_bytes > _MAX_FILES_BYTES:
            raise _loss(f"the tokenizer has more than {_MAX_FILES_BYTES} bytes")
        content += response.chunk
        self._last[response.file_name] = response

    def files(self) -> dict[str, bytes]:
        """The files by name. Raises TriptychError where one is not what the server says it is."""
        for name, last in self._last.items():
            content = self._contents[name]
            if len(content) != last.size_bytes or hashlib.sha256(content).hexdigest() != last.sha256:
                raise _loss(f"{name} did not arrive as it was sent")
        return {name: bytes(content) for name, content in self._contents.items()}


def to_chunk(response: tokenizer_pb2.GetTokenizerResponse) -> tokenizer_pb2.GetTokenizerResponse:
    """A chunk is its own event."""
    return response


def _loss(message: str) -> TriptychError:
    return TriptychError(grpc.StatusCode.DATA_LOSS, message)
