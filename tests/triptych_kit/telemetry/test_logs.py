"""A log whose lines cannot be written: the process does what it would have done."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from triptych_kit.server import ADMIN, Server
from triptych_kit.telemetry.logs import COPIED_TO_TERMINAL, LogStream, is_shown_on_terminal, setup_logs


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """The end to read, and a stream that writes to the other."""
    read_fd, write_fd = os.pipe()
    with os.fdopen(write_fd, "w") as stream:
        yield read_fd, stream


def test_lines_are_written_whole(pipe):
    read_fd, stream = pipe
    lines = [f"{index} {'x' * 5000} ü\n" for index in range(5)]
    log = LogStream(stream)
    for line in lines:
        log.write(line)
    stream.close()
    with os.fdopen(read_fd) as reader:
        assert reader.read() == "".join(lines)


def test_a_line_on_a_terminal_takes_the_place_of_a_bar():
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream, os.fdopen(master, "rb", buffering=0) as terminal:
        stream.write("loading 50 %")
        LogStream(stream).write("line\n")
        shown = b""
        while not shown.endswith(b"\n"):
            shown += terminal.read(4096)
    assert shown == b"loading 50 %\r\x1b[2Kline\r\n"


def test_a_reader_that_is_gone_is_no_error(pipe):
    read_fd, stream = pipe
    os.close(read_fd)
    LogStream(stream).write("line\n")


def test_a_full_disk_a_closed_stream_and_none_are_no_errors():
    with Path("/dev/full").open("w") as full:
        LogStream(full).write("line\n")
    LogStream(full).write("line\n")
    LogStream(None).write("line\n")


def test_a_reader_that_does_not_read_blocks_nothing_and_gets_what_follows_once_it_reads(pipe):
    read_fd, stream = pipe
    log = LogStream(stream)
    for _ in range(1000):
        log.write("x" * 999 + "\n")
    with os.fdopen(read_fd, "rb", buffering=0) as reader:
        received = reader.read(1 << 20)
        assert 0 < len(received) < 1_000_000
        log.write("after\n")
        assert reader.read(1 << 20) == b"after\n"


class Unwritable(io.StringIO):
    """A stream without a file descriptor, whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_logger_goes_on_whatever_its_stream_does(capfd):
    root = logging.getLogger()
    handlers = list(root.handlers)
    try:
        setup_logs("engine", instance="0", log_format="text", log_level="info", stream=Unwritable())
        logging.getLogger("a").info("line")
    finally:
        for handler in set(root.handlers) - set(handlers):
            root.removeHandler(handler)
    assert capfd.readouterr().err == ""


def test_a_stream_in_memory_is_written_to():
    stream = io.StringIO()
    LogStream(stream).write("line\n")
    assert stream.getvalue() == "line\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_for_people_at_a_terminal_and_in_a_process_whose_output_is_copied_to_one(monkeypatch):
    assert [is_shown_on_terminal(stream) for stream in (Terminal(), io.StringIO(), None)] == [
        True,
        False,
        False,
    ]
    monkeypatch.setenv(COPIED_TO_TERMINAL, "1")
    assert is_shown_on_terminal(io.StringIO())


@contextlib.contextmanager
def logged(log_level: str) -> Iterator[io.StringIO]:
    """What is logged inside of the block."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    try:
        setup_logs("engine", instance="0", log_format="json", log_level=log_level, stream=stream)
        yield stream
    finally:
        root.setLevel(level)
        for handler in set(root.handlers) - set(handlers):
            root.removeHandler(handler)


def test_no_level_hides_calls_of_admins():
    with logged("error") as stream:
        logging.getLogger("a").warning("hidden")
        logging.getLogger("triptych.audit").info("admin call")
    assert "admin call" in stream.getvalue()
    assert "hidden" not in stream.getvalue()


async def test_metadata_that_is_no_text_is_not_logged():
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/grpc.health.v1.Health/Check",
        b":authority": b"x",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
        b"authorization": b"Bearer hunter2\xff",
    }
    # HTTP/2: settings, headers as literals without an index, and an empty message.
    head = b"".join(
        bytes((0, len(name))) + name + bytes((len(value),)) + value for name, value in fields.items()
    )
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for kind, flags, stream_id, content in ((4, 0, 0, b""), (1, 4, 1, head), (0, 1, 1, bytes(5))):
        sent += len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big")
        sent += content
    server = Server(listen="127.0.0.1:0", registrations=[], profile=ADMIN, service="x")
    address = await server.start()
    try:
        with logged("info") as stream:
            reader, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(sent)
            async with asyncio.timeout(10):
                await reader.readuntil(b"grpc-status")
            writer.close()
    finally:
        await server.stop(0)
    assert "hunter2" not in stream.getvalue()
