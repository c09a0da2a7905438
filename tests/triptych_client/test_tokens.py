"""A tokenizer's files arrive whole or not at all."""

from __future__ import annotations

import hashlib

import pytest

from triptych.api.v1 import tokenizer_pb2
from triptych_client.errors import TriptychError
from triptych_client.tokens import FileAssembler

CONTENT = b"0123456789"


def chunk(
    offset: int, end: int, *, name: str = "a", content: bytes = CONTENT
) -> tokenizer_pb2.GetTokenizerResponse:
    return tokenizer_pb2.GetTokenizerResponse(
        file_name=name,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size_bytes=len(CONTENT),
        offset=offset,
        chunk=content[offset:end],
    )


def assembled(*chunks: tokenizer_pb2.GetTokenizerResponse) -> dict[str, bytes]:
    assembler = FileAssembler()
    for each in chunks:
        assembler.add(each)
    return assembler.files()


def test_chunks_of_several_files_are_put_together() -> None:
    files = assembled(chunk(0, 4), chunk(4, 10), chunk(0, 10, name="b"))
    assert files == {"a": CONTENT, "b": CONTENT}


@pytest.mark.parametrize(
    ("chunks", "what"),
    [
        ([chunk(0, 4), chunk(5, 10)], "goes on at byte 5, 4 are here"),
        ([chunk(0, 4)], "did not arrive"),
        ([chunk(0, 10, content=CONTENT[::-1])], "did not arrive"),
    ],
)
def test_what_is_missing_or_changed_is_an_error(
    chunks: list[tokenizer_pb2.GetTokenizerResponse], what: str
) -> None:
    with pytest.raises(TriptychError, match=what):
        assembled(*chunks)
