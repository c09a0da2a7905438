"""The files of a batch: what is read, what is kept, where it goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher.run_batch.files import (
    MAX_LINE_BYTES,
    BatchFileError,
    Done,
    count_lines,
    open_output,
    read_lines,
)


def record(line: int, custom_id: str | None = None, *, failed: bool = False) -> bytes:
    error = {"code": "INTERNAL"} if failed else None
    return (
        json.dumps({"custom_id": custom_id, "line": line, "response": None, "error": error}).encode() + b"\n"
    )


def done_of(tmp_path: Path, content: bytes) -> tuple[Done, bytes]:
    """What an output with this content holds, and the file after one more line was written to it."""
    source, path = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"")
    path.write_bytes(content)
    output, done = open_output(source, path, resume=True)
    with output:
        output.write(b"next\n")
    return done, path.read_bytes()


def test_empty_lines_are_no_requests_but_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a\n\n \nb")
    assert list(read_lines(path)) == [(1, b"a\n"), (4, b"b")]
    assert count_lines(path) == 2


def test_a_line_above_the_limit_is_cut_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * (2 * MAX_LINE_BYTES + 5) + b"\nb\n")
    (first, cut), second = read_lines(path)
    assert (first, len(cut)) == (1, MAX_LINE_BYTES + 1)
    assert second == (2, b"b\n")


def test_a_new_output_has_nothing_done(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b"")
    output, done = open_output(source, tmp_path / "out", resume=False)
    output.close()
    assert (done.custom_ids, done.unnamed_lines, done.num_failed) == (set(), set(), 0)


def test_resuming_knows_ids_nameless_lines_and_failures(tmp_path: Path) -> None:
    content = record(1, "a") + record(2, "b", failed=True) + record(3, failed=True)
    done, after = done_of(tmp_path, content)
    assert (done.custom_ids, done.unnamed_lines, done.num_failed) == ({"a", "b"}, {3}, 2)
    assert after == content + b"next\n"


def test_a_last_line_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    done, after = done_of(tmp_path, record(1, "a") + record(2, "b")[:-10])
    assert done.custom_ids == {"a"}
    assert after == record(1, "a") + b"next\n"


@pytest.mark.parametrize("content", [b"{}\n", b"text\n", b"[1]\n", b"[" * 100_000 + b"\n"])
def test_a_file_that_is_no_output_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BatchFileError, match=r"line 1 of .* is not a result"):
        done_of(tmp_path, content)
    assert (tmp_path / "out").read_bytes() == content


def test_results_are_not_overwritten_without_being_told(tmp_path: Path) -> None:
    source, path = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"")
    path.write_bytes(record(1, "a"))
    with pytest.raises(BatchFileError, match="--resume"):
        open_output(source, path, resume=False)


def test_an_input_is_not_its_own_output(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"")
    with pytest.raises(BatchFileError, match="at once"):
        open_output(path, path, resume=True)


def test_an_output_that_cannot_be_read_back_is_refused_with_the_reason(tmp_path: Path) -> None:
    source, pipe = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"{}\n")
    os.mkfifo(pipe)
    with pytest.raises(BatchFileError, match=r"cannot write .*out: .*not seekable"):
        open_output(source, pipe, resume=False)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"cannot read .*nothing"):
        count_lines(tmp_path / "nothing")
    with pytest.raises(BatchFileError, match=r"cannot write .*out"):
        open_output(tmp_path / "in", tmp_path / "folder" / "out", resume=False)
