"""The two files of a batch: lines in, results out, and where to go on. Knows no request."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# Above what a server takes as a message, so that a line it could serve is never cut.
MAX_LINE_BYTES = 64 * 1024 * 1024


class BatchFileError(Exception):
    """A file of a batch that cannot be used."""


@dataclass(frozen=True, slots=True)
class Done:
    """What an output holds already."""

    custom_ids: Set[str]
    unnamed_lines: Set[int]  # numbers of lines that had no id to be known by
    num_failed: int


def count_lines(path: Path) -> int:
    """How many requests a file has; empty lines are none."""
    return sum(1 for _ in read_lines(path))


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 1; of one that is too long only the beginning.

    Such a beginning is no JSON and so becomes an error of its own. Raises BatchFileError.
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
    """The output to append to and what is in it; raises BatchFileError.

    Without `resume` a file with content is refused: hours of results are not overwritten by a slip. A last
    line that was cut off by a crash is taken away.
    """
    try:
        if path.exists() and path.samefile(source):
            raise BatchFileError(f"{path} is input and output at once")
        if not resume and path.exists() and path.stat().st_size:
            raise BatchFileError(f"{path} has results already: --resume goes on, or choose another file")
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
