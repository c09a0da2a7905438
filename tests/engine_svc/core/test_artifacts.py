"""The files a frontend needs: kept as they were read, and refused where no frontend could use them."""

from __future__ import annotations

import hashlib
import logging

import pytest

from engine_svc.core.artifacts import CHUNK_BYTES, ArtifactKind, check_artifacts, read_artifacts


def test_bytes_and_digest_are_those_of_the_start(tmp_path):
    path = tmp_path / "tokenizer.json"
    content = b"x" * (CHUNK_BYTES + 5)
    path.write_bytes(content)
    (artifact,) = read_artifacts(tmp_path)
    path.unlink()
    assert (artifact.kind, artifact.size_bytes) == (ArtifactKind.TOKENIZER, CHUNK_BYTES + 5)
    assert [offset for offset, _ in artifact.chunks()] == [0, CHUNK_BYTES]
    assert hashlib.sha256(b"".join(chunk for _, chunk in artifact.chunks())).hexdigest() == artifact.sha256


def test_an_empty_file_has_one_empty_chunk(tmp_path):
    (tmp_path / "config.json").write_bytes(b"")
    (artifact,) = read_artifacts(tmp_path)
    assert list(artifact.chunks()) == [(0, b"")]


@pytest.mark.parametrize("content", [b"{broken", b"[1]", b"{}", b"\xff\xfe"])
def test_a_tokenizer_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not"):
        check_artifacts(read_artifacts(tmp_path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"[]"),
        ("generation_config.json", b"{"),
        ("generation_config.json", b"[]"),
        ("chat_template.jinja", b"\xff\xfe"),
        ("preprocessor_config.json", b"[]"),
        ("processor_config.json", b"{"),
    ],
)
def test_a_file_that_no_frontend_can_read_is_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is not "):
        check_artifacts(read_artifacts(tmp_path))
    (tmp_path / name).write_bytes(b"")
    check_artifacts(read_artifacts(tmp_path))


def test_a_folder_without_a_tokenizer_is_warned_of(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    check_artifacts(read_artifacts(tmp_path))
    assert "--tokenizer" in caplog.text
    caplog.clear()
    (tmp_path / "tokenizer.json").write_bytes(b'{"model": {}}')
    check_artifacts(read_artifacts(tmp_path))
    assert caplog.text == ""
