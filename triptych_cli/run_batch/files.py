"""Input and output files of a batch, and where to resume. Knows no request."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# Above a server's message limit, so that a valid line is never truncated.
MAX_LINE_BYTES = 64 * 1024 * 1024


class BatchFileError(Exception):
    """A batch file cannot be used."""


@dataclass(frozen=True, slots=True)
class Done:
    """The results that an output file has already."""

    custom_ids: Set[str]
    unnamed_lines: Set[int]  # line numbers of results without a custom_id
    num_failed: int


def count_lines(path: Path) -> int:
    """The number of non-empty lines of a file."""
    return sum(1 for _ in read_lines(path))


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Non-empty lines with their numbers from 1; a line that is too long is truncated.

    A truncated line is not valid JSON, so it gets an error as its result. Raises BatchFileError.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if not text.endswith(b"\n"):
                    _skip_rest(file)
                if text.strip():
                    yield number, text
    except OSError as error:
        raise BatchFileError(f"cannot read {path}: {error.strerror}") from error


def open_output(source: Path, path: Path, *, resume: bool) -> tuple[BinaryIO, Done]:
    """Open the output to append to and read its results; raises BatchFileError.

    Without `resume` a file with content is refused, so that results are not overwritten by mistake. A last
    line that a crash has truncated is removed.
    """
    try:
        if path.exists() and path.samefile(source):
            raise BatchFileError(f"{path} is input and output at once")
        if not resume and path.exists() and path.stat().st_size:
            raise BatchFileError(f"{path} has results already: --resume continues, or choose another file")
        output = path.open("ab+")
    except OSError as error:
        raise BatchFileError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        return output, _read_done(output, path)
    except BatchFileError:
        output.close()
        raise


def _skip_rest(file: BinaryIO) -> None:
    while text := file.readline(MAX_LINE_BYTES):
        if text.endswith(b"\n"):
            return


def _read_done(output: BinaryIO, path: Path) -> Done:
    custom_ids: set[str] = set()
    unnamed: set[int] = set()
    num_failed = 0
    output.seek(0)
    end = 0
    for number, text in enumerate(output, start=1):
        if not text.endswith(b"\n"):
            break
        end += len(text)
        try:
            record = json.loads(text)
            custom_id, line, error = record["custom_id"], record["line"], record["error"]
        except (ValueError, RecursionError, KeyError, TypeError) as fault:
            raise BatchFileError(f"line {number} of {path} is not a result of a batch") from fault
        num_failed += error is not None
        if isinstance(custom_id, str):
            custom_ids.add(custom_id)
        else:
            unnamed.add(line)
    os.ftruncate(output.fileno(), end)
    output.seek(0, os.SEEK_END)
    return Done(custom_ids, unnamed, num_failed)
